"""An agent inside the engine: the model calls a tool, two MCP servers look up the result, and the text's KV is kept
meanwhile.

    bridle serve demo --tools examples/tools.toml
    bridle run examples/agent.py

The model writes the name of the tool that it wants; a schema allows only existing tools. The script looks up the time
zone of the city with one server and the time there with another. The script adds the result to the conversation, and
only the new tokens are computed then.
"""

import json

import pyaici.server as aici

QUESTION = "What time is it in Oslo?"
ARGUMENTS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "get_time", "description": "Get the time in a city.", "parameters": ARGUMENTS},
}
CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "get_time"},
        "arguments": ARGUMENTS,
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}


async def get_time(city: str) -> str:
    """Return the time in the city, as hours and minutes."""
    zone = await aici.tool("town.zone", {"city": city}).text()
    now = await aici.tool("time.get_current_time", {"timezone": zone}).json()
    return now["datetime"][11:16]


async def main() -> None:
    begin = aici.Label()
    messages = [{"role": "user", "content": QUESTION}]
    await aici.chat(messages, tools=[TOOL])
    await aici.FixedTokens("<tool_call>\n")
    call = json.loads(await aici.gen_text(json_schema=CALL, max_tokens=60))
    city = call["arguments"]["city"]
    try:
        result = {"time": await get_time(city)}
    except aici.ToolError as error:
        result = {"error": str(error)}
    print("called:", city, result)
    messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
    messages.append({"role": "tool", "content": json.dumps(result)})
    await aici.chat(messages, tools=[TOOL], following=begin)
    await aici.gen_text(stop_at=".", max_tokens=30, store_var="answer")


aici.start(main())
