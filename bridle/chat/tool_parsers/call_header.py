"""Parses the beginning and the end of a call in growing text: the literals and fields around the arguments, in any
format."""

from __future__ import annotations

import re

from bridle.chat.stream_deltas import held_back
from bridle.chat.tool_parsers.call_format import ARGUMENTS, FIELDS, NAME, CallFormat

_NAME = re.compile(r"[\w.\-:/ ]{1,256}")
BARE_NAME = re.compile(r"[\w.\-:/]{1,256}")
_FIELD = re.compile(r"[^\s<>\[\]{}\"]{0,128}")


class Undecided(Exception):
    """More text is needed to decide whether the text is a call."""


class NotACall(Exception):
    """The text is not a call."""


def read_header(form: CallFormat, text: str, is_last: bool) -> tuple[str, int]:
    """Return the name of a call, and the position where its arguments begin. Raises `Undecided` or `NotACall`."""
    parts = form.call[: form.call.index(ARGUMENTS)]
    name, at = "", 0
    for place, part in enumerate(parts):
        if part not in FIELDS:
            at = _pass(text, at, part, is_last)
            continue
        behind = parts[place + 1] if place + 1 < len(parts) else ""
        value, at = _field(text, at, part, behind.strip(), is_last)
        if part == NAME and name and value != name:
            raise NotACall
        name = value if part == NAME else name
    return name, at


def _pass(text: str, at: int, literal: str, is_last: bool) -> int:
    """Return the position after a literal. The white space in the text may differ from the literal's."""
    for word in literal.split():
        start = at
        while start < len(text) and text[start].isspace():
            start += 1
        if not text.startswith(word, start):
            if word.startswith(text[start:]) and not is_last:
                raise Undecided
            raise NotACall
        at = start + len(word)
    return at


def _field(text: str, at: int, field: str, behind: str, is_last: bool) -> tuple[str, int]:
    """Return a name, an id or a number, up to the literal `behind`, and the position of that literal."""
    allowed = _NAME if field == NAME else _FIELD
    first = behind.split()[0] if behind else ""
    if first:
        end = text.find(first, at)
        value = text[at:] if end < 0 else text[at:end]
        if value and not allowed.fullmatch(value[: len(value) - held_back(value, first)].strip() or "x"):
            raise NotACall
        if end < 0:
            if is_last or len(value) > 512:
                raise NotACall
            raise Undecided
        return value.strip(), end
    found = (BARE_NAME if field == NAME else _FIELD).match(text, at)
    if found is None:
        if at < len(text) or is_last:
            raise NotACall
        raise Undecided
    if found.end() == len(text) and not is_last:
        raise Undecided
    return found[0].strip(), found.end()


def end_pattern(form: CallFormat) -> re.Pattern[str]:
    """Return a pattern for the end of a call, with any white space within it. The pattern does not begin with white
    space, because it would then be tried at each of many spaces."""
    return re.compile(r"\s*+".join(map(re.escape, form.closing.split())))
