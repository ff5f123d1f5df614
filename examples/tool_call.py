"""A tool call that is always one of the tools, with arguments of the right types.

    bridle run examples/tool_call.py

The model decides by itself whether to call a tool: what it would say next tells. If it does, a schema made of the
tools' own schemas leaves it no way to invent a tool, an argument or a type.
"""

import json

import pyaici.server as aici

TOOLS = {
    "weather": {"city": "string"},
    "add": {"a": "integer", "b": "integer"},
}
REQUEST = "What is the weather in Oslo?"


def call_schema():
    """Any one of the tools with all of its arguments."""
    calls = []
    for name, arguments in TOOLS.items():
        kinds = {argument: {"type": kind} for argument, kind in arguments.items()}
        calls.append(closed({"name": {"const": name}, "arguments": closed(kinds)}))
    return {"anyOf": calls}


def closed(properties):
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


async def main():
    signatures = "".join(
        f"\n- {name}({', '.join(f'{argument}: {kind}' for argument, kind in arguments.items())}): A tool."
        for name, arguments in TOOLS.items()
    )
    await aici.FixedTokens(f"<|system|>Tools:{signatures}<|end|><|user|>{REQUEST}<|end|><|assistant|>")
    wishes = await aici.candidates(3)
    print("wishes:", *(f"{wish.text!r} {wish.probability:.1%}" for wish in wishes))
    if wishes[0].text.startswith("<"):
        await aici.FixedTokens("<tool_call>\n")
        call = json.loads(await aici.gen_text(json_schema=call_schema(), max_tokens=60, store_var="call"))
        await aici.FixedTokens("\n</tool_call>")
        print("calls", call["name"], "with", call["arguments"])
    else:
        await aici.gen_text(stop_at=".")


aici.start(main())
