"""Parses a line that a user typed at the interactive client: a prompt, then options.

    Hello there max_tokens=5 temperature=1.2 logit_bias={1: 100}

The prompt is the text before the first word of the form `name=`, without spaces at its end. The value of an option is a
Python literal and may contain spaces; literals are parsed, never executed. The option `prompt="Hello there "` gives a
prompt with spaces at its end, and `prompt=[15496, 612]` gives a prompt of tokens.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import Any

from bridle.errors import InvalidRequest
from bridle.literals import parse_expression

QUIT = ("quit", "exit")
_OPTION = re.compile(r"(?:^|(?<=\s))([A-Za-z_]\w*)=")
_OURS = ("model", "stream_id")


@dataclass(frozen=True, slots=True)
class Line:
    """The parts of a typed line: a prompt, and the options to send with it."""

    prompt: str | list[int]
    options: dict[str, Any] = field(default_factory=dict)


def parse_line(text: str) -> Line:
    """Parse a line. Raises `InvalidRequest` that names the word that cannot be parsed."""
    marks = list(_OPTION.finditer(text))
    if not marks:
        return Line(text)
    prompt = text[: marks[0].start()].rstrip(" ")
    options = _options(text, marks)
    for name in _OURS:
        if name in options:
            raise InvalidRequest(f"{name}= cannot be set here, because the client sets it", name)
    given = options.pop("prompt", None)
    if given is None:
        return Line(prompt, options)
    is_tokens = isinstance(given, list) and all(type(token) is int for token in given)
    if prompt or not (isinstance(given, str) or is_tokens):
        raise InvalidRequest(
            "prompt= needs a text in quotes or a list of token ids, and no other prompt before it", "prompt"
        )
    return Line(given, options)


def _options(text: str, marks: list[re.Match[str]]) -> dict[str, Any]:
    """Split the text into options. A value ends where the next option begins, unless that option is inside the
    value."""
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    options: dict[str, Any] = {}
    at = 0
    while at < len(marks):
        mark = marks[at]
        for last in range(at, len(marks)):
            source = text[mark.end() : ends[last]].strip()
            found, value = _literal(source)
            if found:
                break
        else:
            first = text[mark.end() : ends[at]].strip()
            raise InvalidRequest(f"{mark[1]}={first}: {first!r} is not a valid value; text needs quotes", mark[1])
        if mark[1] in options:
            raise InvalidRequest(f"{mark[1]}= is given twice", mark[1])
        options[mark[1]] = value
        at = last + 1
    return options


def _literal(source: str) -> tuple[bool, Any]:
    try:
        return True, ast.literal_eval(parse_expression(source))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False, None
