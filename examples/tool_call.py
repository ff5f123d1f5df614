"""A tool call that always names an existing tool, with arguments of the right types.

    bridle run examples/tool_call.py

The model itself decides whether to call a tool: its most probable next token shows the decision. If the model calls a
tool, a schema prevents unknown tools and arguments and wrong types. This schema is made of the tools' own schemas.
"""

import json

import pyaici.server as aici

TOOLS = {
    "weather": {"city": "string"},
    "add": {"a": "integer", "b": "integer"},
}
REQUEST = "What is the weather in Oslo?"


def schemas() -> dict[str, object]:
    """Return the schema of the arguments of each tool."""
    return {
        name: closed({argument: {"type": kind} for argument, kind in arguments.items()})
        for name, arguments in TOOLS.items()
    }


def call_schema() -> dict[str, object]:
    """Return the schema of one call: the name of a tool and all its arguments."""
    return {"anyOf": [closed({"name": {"const": name}, "arguments": kinds}) for name, kinds in schemas().items()]}


def closed(properties: dict[str, object]) -> dict[str, object]:
    """Return the schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


async def main() -> None:
    functions = [{"name": name, "parameters": parameters} for name, parameters in schemas().items()]
    await aici.chat(REQUEST, tools=[{"type": "function", "function": function} for function in functions])
    wishes = await aici.candidates(3)
    print("wishes:", *(f"{wish.text!r} {wish.probability:.1%}" for wish in wishes))
    if wishes[0].text.startswith(("<", "{")):  # some models leave out the tag
        await aici.FixedTokens("<tool_call>\n")
        call = json.loads(await aici.gen_text(json_schema=call_schema(), max_tokens=60, store_var="call"))
        await aici.FixedTokens("\n</tool_call>")
        print("calls", call["name"], "with", call["arguments"])
    else:
        await aici.gen_text(stop_at=".")


aici.start(main())
