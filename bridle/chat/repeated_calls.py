"""Detects repeated tool calls: a small model may repeat a call endlessly, within one output or over several turns.

A call is repeated if its markup, name and arguments equal those of an earlier call in the same output. Only formats
with tags around each call mark where a call ends; in other formats, only the token limit ends repeated calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from bridle.chat.reasoning import ThinkTags
from bridle.chat.tool_parsers.call_format import FIELDS
from bridle.chat.tool_parsers.formats import InferredFormat, ToolFormat
from bridle.engine.request import RepeatMarks

#: A text that arguments do not contain by chance, unlike `}` or `)`.
_TAG = re.compile(r"[<\[|｜][^{}]*\w[^{}]*[>\]|｜]")


def marks_of(kind: ToolFormat, tags: ThinkTags | None) -> RepeatMarks | None:
    """Return the markup around each call; None if the format has no such markup. Calls within reasoning do not
    count."""
    around = _around(kind)
    return None if around is None else RepeatMarks(*around, "" if tags is None else tags.closing)


def _around(kind: ToolFormat) -> tuple[str, str] | None:
    if not isinstance(kind, InferredFormat):
        return None
    first, last = kind.form.call[0], kind.form.call[-1].strip()
    if first in FIELDS or not first.strip() or not _TAG.search(last):
        return None
    return first.strip(), last


def repeats_calls(messages: Sequence[Mapping[str, Any]], limit: int) -> bool:
    """Return whether a conversation ends with `limit` equal turns of the model, with the same calls and results."""
    turns = list(islice(_last_turns(messages), limit))
    return len(turns) == limit and all(turn == turns[0] for turn in turns)


def _last_turns(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield the calls and results of the turns at the end of a conversation, last turn first."""
    results: list[Any] = []
    for message in reversed(messages):
        if message.get("role") == "tool":
            results.append(message.get("content"))
        elif message.get("role") == "assistant" and results and isinstance(message.get("tool_calls"), list):
            yield _calls_of(message["tool_calls"]), results
            results = []
        else:
            return


def _calls_of(calls: Any) -> Any:
    """Return names and arguments of calls, independent of spacing. Malformed calls are refused later, with an error
    about their message."""
    functions = [call.get("function") if isinstance(call, Mapping) else call for call in calls]
    return [(each.get("name"), _canonical(each.get("arguments"))) for each in functions if isinstance(each, Mapping)]


def _canonical(arguments: Any) -> Any:
    """Return arguments as JSON text with sorted names, so that nested values can be compared as text."""
    try:
        read = msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
        return msgspec.json.encode(read, order="sorted")
    except (msgspec.MsgspecError, RecursionError):
        return arguments
