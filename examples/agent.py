"""An agent inside the engine: the model calls a tool, and two MCP servers answer while its KV waits.

    bridle serve demo --tools examples/tools.toml
    bridle run examples/agent.py

The model writes which tool it wants; a schema leaves it no way to invent one. The script looks up the time zone of the
city with one server and the time there with another, and writes the result. Only those tokens are computed then: the
conversation before them stays where it is.
"""

import json

import pyaici.server as aici

QUESTION = "What time is it in Oslo?"
CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "get_time"},
        "arguments": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}


async def get_time(city):
    """The time there, as hours and minutes."""
    zone = await aici.tool("town.zone", {"city": city}).text()
    now = await aici.tool("time.get_current_time", {"timezone": zone}).json()
    return now["datetime"][11:16]


async def main():
    tools = "Tools:\n- get_time(city: string): Get the time in a city."
    await aici.FixedTokens(f"<|system|>{tools}<|end|><|user|>{QUESTION}<|end|><|assistant|><tool_call>\n")
    call = json.loads(await aici.gen_text(json_schema=CALL, max_tokens=60))
    city = call["arguments"]["city"]
    try:
        result = {"time": await get_time(city)}
    except aici.ToolError as error:
        result = {"error": str(error)}
    print("called:", city, result)
    await aici.FixedTokens(f"\n</tool_call><|end|><|tool|>{json.dumps(result)}<|end|><|assistant|>")
    await aici.gen_text(stop_at=".", max_tokens=30, store_var="answer")


aici.start(main())
