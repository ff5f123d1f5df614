"""Exercises with tools: choosing one, writing its arguments as JSON, and answering from its result.

The tools a conversation offers, their order and their names vary, so the model learns to copy names from the
system message rather than to recite them. What is held out is a request: the wording together with its
arguments.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lab.demo.corpus import facts, world
from lab.demo.corpus.document import Exercise, Message, ToolSpec

_WORD_STARTS = (
    "b",
    "br",
    "d",
    "f",
    "g",
    "gl",
    "h",
    "k",
    "l",
    "m",
    "n",
    "p",
    "pr",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "z",
)
_WORD_ENDS = ("a", "an", "el", "en", "il", "in", "o", "on", "or", "um", "ark", "est", "ix", "oom", "ell")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of tool: its possible names, its parameters, and how people ask for it."""

    names: tuple[str, ...]
    description: str
    parameters: dict[str, str]
    requests: tuple[str, ...]
    arguments: Callable[[random.Random], dict[str, Any]]
    result: Callable[[random.Random, dict[str, Any]], tuple[dict[str, Any], str]]
    """A result of the tool, and the answer that the model gives from it."""


def invented_word(rng: random.Random) -> str:
    """A word that means nothing, to practice copying."""
    return "".join(rng.choice(_WORD_STARTS) + rng.choice(_WORD_ENDS) for _ in range(rng.randrange(1, 3)))


def any_call(rng: random.Random) -> Exercise:
    """A request that calls for a tool; in most conversations its result and the final answer follow."""
    kind = rng.choice(_KINDS)
    name = rng.choice(kind.names)
    others = rng.sample([other for other in _KINDS if other is not kind], rng.randrange(0, 3))
    offered = [_spec(kind, name), *(_spec(other, rng.choice(other.names)) for other in others)]
    rng.shuffle(offered)
    arguments = kind.arguments(rng)
    request = rng.choice(kind.requests).format(**arguments)
    messages = _call(request, name, arguments)
    if rng.random() < 0.6:
        messages += _answer(*kind.result(rng, arguments))
    return Exercise("tool", ("tool", request), messages, tools=tuple(offered))


def named_call(rng: random.Random) -> Exercise:
    """A tool of an invented name, called by that name with given arguments."""
    names = [
        f"{rng.choice(('get', 'set', 'find', 'run', 'make'))}_{invented_word(rng)}" for _ in range(rng.randrange(1, 4))
    ]
    offered = [_invented_spec(rng, name) for name in names]
    chosen = rng.choice(offered)["function"]
    arguments = {key: _value(rng, schema["type"]) for key, schema in chosen["parameters"]["properties"].items()}
    told = " and ".join(f"{key} {value}" for key, value in arguments.items())
    request = rng.choice(("Call {n} with {t}.", "Please run {n} with {t}.", "Use {n} with {t}.")).format(
        n=chosen["name"], t=told
    )
    messages = _call(request, chosen["name"], arguments)
    if rng.random() < 0.3:
        result = invented_word(rng)
        messages += _answer({"result": result}, f"The result is {result}.")
    return Exercise("tool", ("tool", request), messages, tools=tuple(offered))


def no_call(rng: random.Random) -> Exercise:
    """A question that the model answers itself although tools are offered."""
    inner = facts.question(rng) if rng.random() < 0.6 else facts.yes_no(rng)
    offered = [_spec(kind, rng.choice(kind.names)) for kind in rng.sample(_KINDS, rng.randrange(1, 4))]
    return Exercise(inner.category, inner.key, inner.messages, tools=tuple(offered))


def tool_spec(name: str, description: str, parameters: dict[str, str]) -> ToolSpec:
    """A tool in OpenAI form whose parameters (name to JSON type) are all required."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _spec(kind: Kind, name: str) -> ToolSpec:
    return tool_spec(name, kind.description, kind.parameters)


def _invented_spec(rng: random.Random, name: str) -> ToolSpec:
    keys = dict.fromkeys(invented_word(rng) for _ in range(rng.randrange(1, 3)))
    description = rng.choice(("A tool.", "Does something useful.", f"Tool for {invented_word(rng)}."))
    return tool_spec(name, description, {key: rng.choice(("string", "integer")) for key in keys})


def _value(rng: random.Random, kind: str) -> str | int:
    if kind == "integer":
        return rng.randrange(1000)
    return rng.choice((invented_word(rng), rng.choice(world.NAMES), rng.choice(world.CITIES)))


def _call(request: str, name: str, arguments: dict[str, Any]) -> tuple[Message, ...]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return ({"role": "user", "content": request}, {"role": "assistant", "content": "", "tool_calls": [call]})


def _answer(result: dict[str, Any], answer: str) -> tuple[Message, ...]:
    return ({"role": "tool", "content": json.dumps(result)}, {"role": "assistant", "content": answer})


def _weather(rng: random.Random, arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
    sky, degrees = rng.choice(("sunny", "cloudy", "rainy", "windy", "foggy", "snowy")), rng.randrange(36)
    return {"sky": sky, "temperature": degrees}, f"It is {sky} in {arguments['city']}, at {degrees} degrees."


def _clock(rng: random.Random, arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
    time = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    return {"time": time}, f"It is {time} in {arguments['city']}."


def _sum(rng: random.Random, arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
    result = arguments["a"] * arguments["b"]
    return {"result": result}, f"The result is {result}."


def _done(rng: random.Random, arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
    return {"status": "ok"}, "Done."


def _search(rng: random.Random, arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
    found = rng.randrange(2, 60)
    return {"found": found}, f"I found {found} results for {arguments['query']}."


def _phone(rng: random.Random, arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
    number = "".join(str(rng.randrange(10)) for _ in range(6))
    return {"phone": number}, f"The phone number of {arguments['name']} is {number}."


_MESSAGES = ("dinner is ready", "the train is late", "the meeting starts soon", "the shop is closed",
"the book has arrived",
             "the door is open", "lunch is at noon", "the car is clean", "the garden needs water",
             "the test went well")  # fmt: skip
_QUERIES = ("red shoes", "old maps", "garden tools", "cheap flights", "chess books", "green tea",
"blue paint", "wool socks",
            "bread recipes", "piano music", "bird songs", "train tickets", "used bikes",
            "silver rings")  # fmt: skip

_KINDS: tuple[Kind, ...] = (
    Kind(
        ("get_weather", "weather", "current_weather"), "Get the weather in a city.", {"city": "string"},
        ("What is the weather in {city}?", "How is the weather in {city}?",
        "What is the weather like in {city}?",
         "Tell me the weather in {city}.", "Is it warm in {city} today?", "Weather in {city}, please."),
        lambda rng: {"city": rng.choice(world.CITIES)}, _weather,
    ),
    Kind(
        ("get_time", "clock", "local_time"), "Get the time in a city.", {"city": "string"},
        ("What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?",
         "What is the local time in {city}?", "I need the time in {city}."),
        lambda rng: {"city": rng.choice(world.CITIES)}, _clock,
    ),
    Kind(
        ("multiply", "product", "calc_product"), "Multiply two numbers.", {"a": "integer", "b": "integer"},
        ("What is {a} times {b}?", "Multiply {a} by {b}.", "How much is {a} times {b}?",
        "Compute {a} times {b}."),
        lambda rng: {"a": rng.randrange(2, 100), "b": rng.randrange(2, 100)}, _sum,
    ),
    Kind(
        ("set_timer", "start_timer", "timer"), "Start a timer.", {"minutes": "integer"},
        ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.",
        "Wake me in {minutes} minutes.",
         "Remind me in {minutes} minutes."),
        lambda rng: {"minutes": rng.randrange(2, 100)}, _done,
    ),
    Kind(
        ("send_message", "send_text", "message"), "Send a message to a person.", {"to": "string",
        "text": "string"},
        ("Tell {to} that {text}.", "Send {to} a message that {text}.", "Let {to} know that {text}.",
        "Write to {to} that {text}."),
        lambda rng: {"to": rng.choice(world.NAMES), "text": rng.choice(_MESSAGES)}, _done,
    ),
    Kind(
        ("search", "web_search", "find"), "Search the web.", {"query": "string"},
        ("Search for {query}.", "Find {query} on the web.", "Look up {query}.", "Do a search for {query}.",
         "Please search the web for {query}."),
        lambda rng: {"query": rng.choice(_QUERIES)}, _search,
    ),
    Kind(
        ("get_phone", "lookup_phone", "phone_book"), "Find the phone number of a person.", {"name": "string"},
        ("What is the phone number of {name}?", "Find the phone number of {name}.",
        "I need the number of {name}.",
         "How can I call {name}?", "Look up the phone number of {name}."),
        lambda rng: {"name": rng.choice(world.NAMES)}, _phone,
    ),
    Kind(
        ("book_table", "reserve_table", "restaurant"), "Book a table.", {"people": "integer",
        "day": "string"},
        ("Book a table for {people} people on {day}.", "Reserve a table for {people} on {day}.",
         "I want a table for {people} people on {day}.", "On {day} we need a table for {people} people."),
        lambda rng: {"people": rng.randrange(2, 13), "day": rng.choice(world.SERIES["days"])}, _done,
    ),
)  # fmt: skip
