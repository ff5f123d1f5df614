"""Parses arguments between tags, such as `<parameter=city>Rome</parameter>`, to JSON values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from bridle.chat.tool_parsers.argument_values import MAX_DEPTH, property_schema, read_value
from bridle.chat.tool_parsers.call_format import KEY, TaggedArguments

#: Matches a CDATA section, in which some models write values.
_CDATA = re.compile(r"\A<!\[CDATA\[(.*)\]\]>\Z", re.DOTALL)
#: The maximum number of possible ends of one value that are tried.
_MOST_ENDS = 16
#: The maximum length of a key, with white space around it.
_LONGEST_KEY = 256
_NOT_TEXT = ["integer", "number", "boolean", "object", "array", "null"]


def read_tagged(form: TaggedArguments, text: str, schema: object = None, is_cut: bool = False) -> dict[str, Any]:
    """Return tagged arguments. Raises `ValueError` for other text. If the text `is_cut` off, only the complete
    arguments are returned."""
    found: dict[str, Any] = {}
    at = 0
    while (at := _skip(text, at)) < len(text):
        try:
            key, value, at = _argument(form, text, at, schema)
        except ValueError:
            if is_cut:
                break
            raise
        found[key] = value
    return found


_SPACE = re.compile(r"[ \t\n,]*")


def _skip(text: str, at: int) -> int:
    """Return the next position after white space and commas."""
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _argument(form: TaggedArguments, text: str, at: int, schema: object) -> tuple[str, Any, int]:
    opening, start = form.opening.strip(), text.find(form.opening.strip(), at)
    if start < 0 or text[at:start].strip(" \t\n,"):
        raise ValueError("there is text between two arguments")
    start += len(opening)
    kind, key, begin = _key_and_type(form, text, start)
    failure = ValueError("a value does not end")
    for end, behind in islice(_ends_of_value(form, text, begin, key), _MOST_ENDS):
        raw = _CDATA.sub(r"\1", _without_layout(form, kind, text[begin:end]))
        try:
            return key, _value(form, kind, raw, property_schema(schema, key)), behind
        except ValueError as error:  # JSON strings may contain text like an end tag
            failure = error
    raise failure


def _value(form: TaggedArguments, kind: str, raw: str, schema: object) -> Any:
    if form.is_nested:
        return _nested(form, raw, schema)
    if kind == "string":
        return raw
    if kind != "any" or "string" in form.middles:
        return read_value(raw, schema or {"type": [kind] if kind != "any" else _NOT_TEXT})
    return read_value(raw, schema)


def _key_and_type(form: TaggedArguments, text: str, start: int) -> tuple[str, str, int]:
    """Return the type that the tag of the key names, the key, and the position where the value begins."""
    best: tuple[int, int, str] | None = None
    for kind, middle in form.middles.items():
        pattern = re.compile(r"\s*+".join(map(re.escape, middle.split())))
        found = pattern.search(text, start, start + _LONGEST_KEY + len(middle))
        if found is not None and (best is None or found.start() < best[0]):
            best = (found.start(), found.end(), kind)
    if best is None:
        raise ValueError("the key of an argument has no value after it")
    key = text[start : best[0]].strip().strip('"')
    if not key or "\n" in key or len(key) > _LONGEST_KEY:
        raise ValueError("the key of an argument is not valid")
    return best[2], key, best[1]


def _ends_of_value(form: TaggedArguments, text: str, begin: int, key: str) -> Iterator[tuple[int, int]]:
    """Yield the possible ends of a value, each with the position after its closing tag. An end is possible if another
    argument follows, or no text."""
    closing = form.closing.replace(KEY, key).strip()
    at = begin
    while (end := text.find(closing, at)) >= 0:
        behind = _skip(text, end + len(closing))
        if behind == len(text) or text.startswith(form.opening.strip(), behind):
            yield end, end + len(closing)
        at = end + 1


def _without_layout(form: TaggedArguments, kind: str, raw: str) -> str:
    """Return a value without the line breaks that belong to its tags."""
    if form.middles[kind].endswith("\n"):
        raw = raw.removeprefix("\n")
    return raw.removesuffix("\n") if form.closing.startswith("\n") else raw


def _nested(form: TaggedArguments, raw: str, schema: object, depth: int = 0) -> Any:
    """Return a value that may consist of tags: an array if all tags are items, else an object."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deep")
    opening = form.opening.strip()
    if not raw.strip().startswith(opening):
        return read_value(raw, schema) if raw or schema else raw
    pairs = []
    at = 0
    while raw[at:].strip():
        start = raw.find(opening, at) + len(opening)
        _, key, begin = _key_and_type(form, raw, start)
        end, at = next(_ends_of_value(form, raw, begin, key), (-1, -1))
        if end < 0:
            raise ValueError("a value does not end")
        pairs.append((key, raw[begin:end]))
    items = schema.get("items") if isinstance(schema, Mapping) else None
    if all(key == "item" for key, _ in pairs):
        return [_nested(form, each, items, depth + 1) for _, each in pairs]
    return {key: _nested(form, each, property_schema(schema, key), depth + 1) for key, each in pairs}
