"""A call of one of several functions, or of none, whose arguments contain only values from the question.

    bridle run examples/recipes/call.py

The function is chosen by the probability of its whole name, and "none" is one of the choices. A schema limits the
arguments. An optional argument whose value the question does not contain is rolled back, because models tend to fill in
all arguments.
"""

import json

import pyaici.server as aici
from pyaici.constraints import HostConstraint

QUESTION = "What is the weather in Oslo?"
FUNCTIONS = [
    {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
            "required": ["city"],
        },
    },
]
ASK = 'Answer with one call in JSON, {"name": ..., "arguments": {...}}, or with the name "none" if no function fits.'


def is_said(value: object) -> bool:
    """Return whether the question contains a value, or all parts of a list or object."""
    if isinstance(value, list | dict):
        return bool(value) and all(map(is_said, value.values() if isinstance(value, dict) else value))
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).lower() in QUESTION.lower()


async def main() -> None:
    if len(await aici.GetPrompt()) < 2:  # a request may have its own conversation
        system = "\n".join([*map(json.dumps, FUNCTIONS), ASK])
        await aici.chat([{"role": "system", "content": system}, {"role": "user", "content": QUESTION}])
    known = {each["name"]: each["parameters"] for each in FUNCTIONS}
    begin, choice = aici.Label(), json.dumps([f'{name}"' for name in (*known, "none")])
    await aici.FixedTokens('{"name": "')
    name = (await aici.gen_text(constraint=lambda: HostConstraint("choice", choice), max_tokens=60))[:-1]
    arguments = {}
    if name in known:
        await aici.FixedTokens(', "arguments": ')
        text = await aici.gen_text(json_schema=known[name], max_tokens=200)
        required = known[name].get("required", [])
        arguments = {key: value for key, value in json.loads(text).items() if key in required or is_said(value)}
    await aici.FixedTokens(json.dumps({"name": name, "arguments": arguments}), following=begin)


aici.start(main())
