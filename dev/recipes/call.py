"""Cases of the recipe `call`: questions of the Berkeley Function Calling Leaderboard (Apache licence), from the package
`bfcl-eval`.

Questions with one function, with several functions, and with no suitable function alternate."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

from dev.bfcl import cases as bfcl
from dev.recipes import data
from dev.recipes.recipe import Case, Recipe

_CATEGORIES = ("simple", "multiple", "irrelevance")
_ASK = (
    'Answer with one call in one line of JSON, {"name": ..., "arguments": {...}}, and nothing else. If no function '
    'fits the question, the name is "none".'
)
_LONGEST = 3500  # characters of a prompt


def cases(count: int, seed: int) -> list[Case]:
    """Return the same number of cases of each category, as far as there are enough. The seed determines their order."""
    columns = [[case for case in bfcl.cases_of(_package(), name, 10_000) if _fits(case)] for name in _CATEGORIES]
    for column in columns:
        Random(seed).shuffle(column)
    return [_case(each) for each in chain.from_iterable(zip(*columns, strict=False))][:count]


def _package() -> Path:
    return data.find("bfcl_eval", "pip install --no-deps bfcl-eval --target").parent


def _fits(case: bfcl.Case) -> bool:
    return len(case.messages) == 1 and len(json.dumps(case.functions)) <= _LONGEST


def _case(case: bfcl.Case) -> Case:
    functions = [tool["function"] for tool in case.tools(is_strict=False)]
    system = "\n".join([*map(json.dumps, functions), _ASK])
    messages = [{"role": "system", "content": system}, *case.messages]
    calls = [_closed(each["name"], each["parameters"]) for each in functions]
    nothing = _closed("none", {"type": "object", "properties": {}, "additionalProperties": False})
    constants = {"FUNCTIONS": functions, "QUESTION": case.messages[0]["content"]}
    return Case(case.id, messages, case, {"json_schema": {"anyOf": [*calls, nothing]}}, constants)


def _closed(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def is_right(case: Case, text: str) -> bool:
    """Return whether the package's checker accepts the call, or whether no call was right and none was made."""
    call = _first_call(text)
    called = call if call is not None and call["name"] != "none" else None
    calls = [] if called is None else [{"name": called["name"], "arguments": json.dumps(called["arguments"])}]
    return bfcl.is_right(_package(), case.known, calls)


def _first_call(text: str) -> dict[str, Any] | None:
    """Return the first JSON object of the text that has a name and arguments."""
    for place in re.finditer(r"\{", text):
        try:
            found, _ = json.JSONDecoder().raw_decode(text, place.start())
        except json.JSONDecodeError:
            continue
        if isinstance(found.get("name"), str) and isinstance(found.get("arguments"), dict):
            return dict(found)
    return None


RECIPE = Recipe("call.py", 120, cases, is_right)
