"""Calls without tags, which small models write: the answer begins with `{"name": "f", ...}`, often in a code fence.

Only a call of an offered function at the beginning of an answer counts, because JSON later in the answer may be the
requested text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from bridle.chat.stream_deltas import CallArguments, CallRules, Content, StreamDelta, ToolCallStart, ToolReader
from bridle.chat.tool_parsers.grammar import Function, arguments, quoted
from bridle.chat.tool_parsers.json_call import JsonCallReader

_FENCES = ("", "```json", "```")
#: Qwen 2.5's template shows calls in double braces, and models imitate them.
_BRACES = ("{", "{{")
_AFTER = re.compile(r"[\s}]*(?:```)?\s*")
_LONGEST_AFTER = 64
_TO_ARGUMENTS = r"\s*,\s*\"(arguments|parameters)\"\s*:\s*"


def where_call_begins(text: str, names: Collection[str], is_last: bool = False) -> int | None:
    """Return the position in `text` where the object of a call begins: -1 if there is no call, None if more text is
    needed to decide."""
    compact = "".join(text.split())
    heads = [f'{fence}{brace}"name":"{name}"' for name in names for fence in _FENCES for brace in _BRACES]
    if any(map(compact.startswith, heads)):
        return text.rindex("{", 0, text.index('"'))
    return None if not is_last and any(head.startswith(compact) for head in heads) else -1


def free_text(
    trigger: str, section: str, functions: Sequence[Function], reads_bare: bool, token: str = ""
) -> list[str]:
    """Return grammar rules for text in which `section` follows each `trigger`, or each special token `token`. With
    `reads_bare`, answers may begin with calls without tags; such a call of a strict function must match its schema."""
    if token:
        one, first, tail, rules = f"FREE {token} {section}", f"ALONE {token} {section}", "FREE", ["FREE: /(?s:.*)/"]
    else:
        tag = re.escape(trigger).replace("\\\n", "\\n").replace("/", "\\/")
        rules = [f"free[suffix={quoted(trigger)}]: /(?s:.*)/", f"TAIL: /(?s:.*)/ & ~/(?s:.*){tag}(?s:.*)/"]
        one, first, tail = f"free {section}", f"begun {section}", "TAIL"
    strict = [each for each in functions if each.is_strict] if reads_bare else []
    if not strict:
        return [f"start: ({one})* {tail}", *rules]
    heads = [_head(each) for each in strict]
    other = f"~/({'|'.join(heads)})(?s:.*)/"
    rules += [] if token else [f"begun[suffix={quoted(trigger)}]: /(?s:.*)/ & {other}"]
    rules += [f"HEAD{n}: /{head}{_TO_ARGUMENTS}/" for n, head in enumerate(heads)]
    bare = " | ".join(f"HEAD{n} {arguments(each, is_indented=True)}" for n, each in enumerate(strict))
    rules += [f"bare: {bare}", r"END: /\s*\}/", f"ALONE: {tail} & {other}"]
    return [f"start: bare END ({one})* {tail} | {first} ({one})* {tail} | ALONE", *rules]


def _head(function: Function) -> str:
    """Return a regular expression for the beginning of a call without tags."""
    name = re.escape(json.dumps(function.name, ensure_ascii=False)).replace("/", "\\/")
    return r"\s*(```(json)?\s*)?\{\s*(\{\s*)?\"name\"\s*:\s*" + name


def without_end(text: str, is_last: bool) -> str | None:
    """Return `text`, which follows a call without tags, without surplus braces and the end of a code fence. Returns
    None if more braces may follow."""
    found = _AFTER.match(text)
    assert found is not None
    rest = text[found.end() :]
    is_open = "```".startswith(rest) and len(text) < _LONGEST_AFTER
    return None if is_open and not is_last else rest


def with_bare_calls(inner: ToolReader, rules: CallRules) -> ToolReader:
    """Return the reader `inner`, extended to answers that begin with a call without tags."""
    return BareCallReader(inner, rules, rules.names) if rules.names else inner


class BareCallReader:
    """Reads a call without tags at the beginning of an answer; the reader `inner` gets the remaining text. Text that is
    not a call is content."""

    def __init__(self, inner: ToolReader, rules: CallRules, names: Collection[str]) -> None:
        self._inner, self._names = inner, names
        self._call = JsonCallReader(0, replace(rules, is_held=True))
        self._held = self._before = ""
        self._step: Callable[[list[StreamDelta], bool], bool] = self._begin
        self._num_calls = 0

    def push(self, text: str, is_last: bool = False) -> list[StreamDelta]:
        """Return the deltas that are certain after `text`. With `is_last`, no more text follows."""
        self._held += text
        pieces: list[StreamDelta] = []
        while self._step(pieces, is_last):
            pass
        return pieces

    def _begin(self, pieces: list[StreamDelta], is_last: bool) -> bool:
        start = where_call_begins(self._held, self._names, is_last)
        if start is None:
            return False
        self._step = self._read if start >= 0 else self._pass
        if start >= 0:
            self._before, self._held = self._held[:start], self._held[start:]
        return True

    def _read(self, pieces: list[StreamDelta], is_last: bool) -> bool:
        text, self._held = self._held, ""
        pieces += self._call.push(text, is_last)
        if not self._call.is_over:
            return False
        self._held = self._call.rest
        if self._call.is_bad:
            pieces.append(Content(self._before + self._call.text))
        self._num_calls, self._step = int(not self._call.is_bad), self._pass if self._call.is_bad else self._close
        return True

    def _close(self, pieces: list[StreamDelta], is_last: bool) -> bool:
        rest = without_end(self._held, is_last)
        if rest is None:
            return False
        self._held, self._step = rest, self._pass
        return True

    def _pass(self, pieces: list[StreamDelta], is_last: bool) -> bool:
        text, self._held = self._held, ""
        for piece in self._inner.push(text, is_last):
            if isinstance(piece, (ToolCallStart, CallArguments)):
                piece = replace(piece, number=piece.number + self._num_calls)
            pieces.append(piece)
        return False
