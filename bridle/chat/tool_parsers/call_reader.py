"""Reads calls out of growing text, in any format that is described by a `CallFormat`.

Text outside of calls is content. From the markup that begins calls on, text is held until it is clear what it is: a
call, or content after all. Spaces and line breaks around markup may differ from what the template writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from bridle.chat.stream_deltas import (
    ANY_CALL,
    CallArguments,
    CallRules,
    Content,
    StreamDelta,
    ToolCallStart,
    held_back,
    new_call_id,
)
from bridle.chat.tool_parsers.argument_values import QuotedReader, property_schema, read_keywords, read_value
from bridle.chat.tool_parsers.call_format import (
    ARGUMENTS,
    FIELDS,
    KEY,
    NAME,
    CallFormat,
    JsonArguments,
    PythonArguments,
    QuotedArguments,
    TaggedArguments,
    markup,
)
from bridle.chat.tool_parsers.json_call import JsonCallReader

_NAME = re.compile(r"[\w.\-:/ ]{1,256}")
_BARE_NAME = re.compile(r"[\w.\-:/]{1,256}")
_FIELD = re.compile(r"[^\s<>\[\]{}\"]{0,128}")
#: Some models protect values in the way of XML.
_CDATA = re.compile(r"\A<!\[CDATA\[(.*)\]\]>\Z", re.DOTALL)
#: How often the end of one call is looked for.
_MAX_TRIES = 4_096


class Undecided(Exception):
    """More text is needed to tell what this is."""


class NotACall(Exception):
    """The text is not a call."""


class CallFormatReader:
    """Reads an output piece by piece."""

    def __init__(self, form: CallFormat, rules: CallRules = ANY_CALL) -> None:
        self._form, self._rules = form, rules
        self._trigger = form.trigger
        self._marks = _marks_between(form)
        self._held = ""
        self._space = ""  # after a call
        self._skipped = ""  # markup that was passed since the last call or content
        self._in_calls = False
        self._num_calls = 0
        self._call: _HeldCall | None = None

    def push(self, text: str, is_last: bool = False) -> list[StreamDelta]:
        """What became certain with `text`; with `is_last` nothing follows."""
        self._held += text
        pieces: list[StreamDelta] = []
        while self._step(pieces, is_last):
            pass
        return pieces

    def _step(self, pieces: list[StreamDelta], is_last: bool) -> bool:
        """Go on; whether that may lead to more."""
        if self._call is not None:
            return self._in_call(self._call, pieces, is_last)
        return self._between(pieces, is_last) if self._in_calls else self._outside(pieces, is_last)

    def _outside(self, pieces: list[StreamDelta], is_last: bool) -> bool:
        before, found, after = self._held.partition(self._trigger)
        keep = 0 if found or is_last else held_back(before, self._trigger)
        self._say(before[: len(before) - keep], pieces)
        self._held = found + after if found else before[len(before) - keep :]
        self._in_calls = bool(found)
        return bool(found)

    def _between(self, pieces: list[StreamDelta], is_last: bool) -> bool:
        """In front of a call, or behind one: pass markup and white space."""
        rest = self._held.lstrip(" \t\n,")
        if self._form.name_key is not None and not any(map(rest.startswith, self._marks)):
            rest = rest.lstrip(" \t\n,[")
        if self._opens(rest):
            self._call = _HeldCall(self._form, self._rules, self._num_calls)
            self._skipped += self._held[: len(self._held) - len(rest)]
            self._call.text, self._held = rest, ""
            return True
        for mark in self._marks:
            if rest.startswith(mark):
                end = len(self._held) - len(rest) + len(mark)
                self._skipped, self._held = self._skipped + self._held[:end], self._held[end:]
                return True
        if not is_last and (not rest or any(mark.startswith(rest) for mark in self._all_marks)):
            return False
        self._in_calls = False
        if self._num_calls:
            self._space, self._skipped = "", ""  # the markup behind calls is no content
        else:
            self._say(self._skipped, pieces)
            self._skipped = ""
        if is_last and not rest:
            return False
        held, self._held = self._held, ""
        # What could not go on begins like markup that was passed over already: the first character is content.
        self._say(held[:1], pieces)
        self._held = held[1:]
        return bool(self._held)

    @property
    def _all_marks(self) -> tuple[str, ...]:
        return (*self._marks, markup(self._form.opening))

    def _opens(self, rest: str) -> bool:
        mark = markup(self._form.opening)
        if mark:
            return rest.startswith(mark)
        if self._form.name_key is not None:
            return rest.startswith("{")
        return bool(_BARE_NAME.match(rest)) and (bool(self._skipped) or self._num_calls > 0)

    def _in_call(self, call: _HeldCall, pieces: list[StreamDelta], is_last: bool) -> bool:
        text, self._held = self._held, ""
        try:
            rest = call.push(text, pieces, is_last)
        except Undecided:
            return False
        except NotACall:
            self._call, self._in_calls = None, False
            self._say(self._skipped + call.text, pieces)
            self._skipped = ""
            return False
        self._call, self._held, self._skipped = None, rest, ""
        self._num_calls, self._space = self._num_calls + 1, ""
        return True

    def _say(self, text: str, pieces: list[StreamDelta]) -> None:
        """Content. White space behind a call waits for what follows: it may separate calls."""
        text, self._space = self._space + text, ""
        if self._num_calls and not text.strip():
            self._space = text
        elif text:
            pieces.append(Content(text))


def _marks_between(form: CallFormat) -> tuple[str, ...]:
    """Markup that may stand between calls, the longest first."""
    opening = markup(form.opening)
    found = {markup(form.section_open), form.section_close.strip(), markup(form.separator)}
    found |= {form.section_close.strip().lstrip("]").strip(), _end_markup(form.closing)}
    if form.name_key is not None or isinstance(form.arguments, PythonArguments):
        found |= {"]", "["}
    return tuple(sorted(found - {"", opening}, key=len, reverse=True))


def _end_markup(closing: str) -> str:
    """The part of a call's end that is no JSON."""
    return closing.strip().lstrip("}").strip()


class _HeldCall:
    """One call, read from its markup on. `text` is all of it, as long as it may turn out to be content."""

    def __init__(self, form: CallFormat, rules: CallRules, number: int) -> None:
        self._form, self._rules, self._number = form, rules, number
        self.text = ""
        self._json: JsonCallReader | None = None
        self._name: str | None = None
        self._body = 0  # where the arguments begin
        self._looked = 0  # up to where an end was looked for
        self._num_tries = 0

    def push(self, text: str, pieces: list[StreamDelta], is_last: bool) -> str:
        """Read on; the text behind the call once it is over. Raises `Undecided` or `NotACall`."""
        fresh = self.text + text if self._json is None else text
        self.text = fresh if self._json is None else self.text + text
        if self._json is None and self._name is None:
            self._begin(is_last)
            fresh = self.text[self._body :]
        if self._json is not None:
            return self._in_json(self._json, fresh, pieces, is_last)
        return self._in_body(pieces, is_last)

    def _begin(self, is_last: bool) -> None:
        if self._form.name_key is not None:
            mark = markup(self._form.opening)
            found = re.compile(r"\s*").match(self.text, len(mark))
            assert found is not None
            self._body = found.end()
            self._json = JsonCallReader(self._number, self._rules, keys=_keys_of(self._form))
            return
        name, self._body = read_header(self._form, self.text, is_last)
        if not self._rules.allow(name):
            raise NotACall
        self._name = name
        if isinstance(self._form.arguments, JsonArguments):
            self._json = JsonCallReader(self._number, self._rules, name)

    def _in_json(self, call: JsonCallReader, text: str, pieces: list[StreamDelta], is_last: bool) -> str:
        pieces += call.push(text, is_last)
        if not call.is_over:
            raise Undecided
        if call.is_bad:
            raise NotACall
        return call.rest

    def _in_body(self, pieces: list[StreamDelta], is_last: bool) -> str:
        assert self._name is not None
        end = _end_pattern(self._form)
        for found in end.finditer(self.text, max(self._looked, self._body)):
            self._looked = found.end()
            self._num_tries += 1
            try:
                value = self._arguments(self.text[self._body : found.start()])
            except ValueError:
                if self._num_tries >= _MAX_TRIES:
                    raise NotACall from None
                continue
            self._tell(value, pieces)
            return self.text[found.end() :]
        if is_last:
            raise NotACall
        self._looked = max(self._looked, self._body, len(self.text) - len(self._form.closing) - 8)
        raise Undecided

    def _arguments(self, text: str) -> dict[str, Any]:
        schema = self._rules.schemas.get(self._name or "")
        match self._form.arguments:
            case TaggedArguments() as tagged:
                return read_tagged(tagged, text, schema)
            case PythonArguments():
                return read_keywords(text)
            case QuotedArguments(quote=quote):
                return QuotedReader(text, quote).fields()
        raise NotACall

    def _tell(self, value: dict[str, Any], pieces: list[StreamDelta]) -> None:
        assert self._name is not None
        pieces.append(ToolCallStart(self._number, self._name, new_call_id()))
        pieces.append(CallArguments(self._number, json.dumps(value, ensure_ascii=False)))


def _keys_of(form: CallFormat) -> tuple[str, str] | None:
    return (form.name_key, form.arguments_key) if form.name_key else None


# -- the head and the end of a call ---------------------------------------------------------------------------


def read_header(form: CallFormat, text: str, is_last: bool) -> tuple[str, int]:
    """The name of a call, and where its arguments begin. Raises `Undecided` or `NotACall`."""
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
    """Where the text goes on behind a literal, whose white space may differ."""
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
    """A name, an id or a number, up to the literal `behind` it."""
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
    found = (_BARE_NAME if field == NAME else _FIELD).match(text, at)
    if found is None:
        if at < len(text) or is_last:
            raise NotACall
        raise Undecided
    if found.end() == len(text) and not is_last:
        raise Undecided
    return found[0].strip(), found.end()


def _end_pattern(form: CallFormat) -> re.Pattern[str]:
    """The end of a call, with any white space; `closing` of tags may lack what only the last tag says."""
    words = [re.escape(word) for word in form.closing.split()]
    return re.compile(r"\s*" + r"\s*".join(words))


# -- arguments between tags -----------------------------------------------------------------------------------


def read_tagged(form: TaggedArguments, text: str, schema: object = None) -> dict[str, Any]:
    """Arguments one by one. Raises `ValueError` for what is written otherwise."""
    found: dict[str, Any] = {}
    at = 0
    while text[at:].strip(" \t\n,"):
        key, value, at = _argument(form, text, at, schema)
        found[key] = value
    return found


def _argument(form: TaggedArguments, text: str, at: int, schema: object) -> tuple[str, Any, int]:
    opening, start = form.opening.strip(), text.find(form.opening.strip(), at)
    if start < 0 or text[at:start].strip(" \t\n,"):
        raise ValueError("text between arguments")
    start += len(opening)
    kind, key, begin = _key_and_type(form, text, start)
    inner = property_schema(schema, key)
    end, behind = _end_of_value(form, text, begin, key)
    raw = _CDATA.sub(r"\1", _without_layout(form, kind, text[begin:end]))
    if form.is_nested:
        return key, _nested(form, raw, inner), behind
    if kind == "string":
        return key, raw, behind
    if kind != "any" or "string" in form.middles:
        return key, read_value(raw, inner or {"type": [kind] if kind != "any" else _NOT_TEXT}), behind
    return key, read_value(raw, inner), behind


_NOT_TEXT = ["integer", "number", "boolean", "object", "array", "null"]


def _key_and_type(form: TaggedArguments, text: str, start: int) -> tuple[str, str, int]:
    """The type that the tag of the key names, the key, and where the value begins."""
    best: tuple[int, int, str] | None = None
    for kind, middle in form.middles.items():
        words = middle.split() or [""]
        pattern = re.compile(r"\s*" + r"\s*".join(map(re.escape, words)))
        found = pattern.search(text, start)
        if found is not None and (best is None or found.start() < best[0]):
            best = (found.start(), found.end(), kind)
    if best is None:
        raise ValueError("a key without a value")
    key = text[start : best[0]].strip().strip('"')
    if not key or "\n" in key or len(key) > 256:
        raise ValueError("not a key")
    return best[2], key, best[1]


def _end_of_value(form: TaggedArguments, text: str, begin: int, key: str) -> tuple[int, int]:
    """Where a value ends, and where the text goes on: at the first end that another argument or nothing follows."""
    closing = form.closing.replace(KEY, key).strip()
    at = begin
    while (end := text.find(closing, at)) >= 0:
        behind = text[end + len(closing) :].lstrip(" \t\n,")
        if not behind or behind.startswith(form.opening.strip()):
            return end, end + len(closing)
        at = end + 1
    raise ValueError("a value does not end")


def _without_layout(form: TaggedArguments, kind: str, raw: str) -> str:
    """A value without the line breaks that belong to its tags."""
    if form.middles[kind].endswith("\n"):
        raw = raw.removeprefix("\n")
    return raw.removesuffix("\n") if form.closing.startswith("\n") else raw


def _nested(form: TaggedArguments, raw: str, schema: object) -> Any:
    """A value that may be tags again: an array if all of them are items, else an object."""
    opening = form.opening.strip()
    if not raw.strip().startswith(opening):
        return read_value(raw, schema) if raw or schema else raw
    pairs = []
    at = 0
    while raw[at:].strip():
        start = raw.find(opening, at) + len(opening)
        _, key, begin = _key_and_type(form, raw, start)
        end, at = _end_of_value(form, raw, begin, key)
        pairs.append((key, raw[begin:end]))
    items = schema.get("items") if isinstance(schema, Mapping) else None
    if all(key == "item" for key, _ in pairs):
        return [_nested(form, each, items) for _, each in pairs]
    return {key: _nested(form, each, property_schema(schema, key)) for key, each in pairs}
