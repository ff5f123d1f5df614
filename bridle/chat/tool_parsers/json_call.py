"""Reads one call as JSON, `{"name": "f", "arguments": {...}}`, while the text grows.

The name is reported when the arguments begin, then the arguments as they arrive. If the object has another layout, or
calls are held, the call is reported as a whole at its end.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from bridle.chat.stream_deltas import ANY_CALL, CallArguments, CallRules, StreamDelta, ToolCallStart, new_call_id

# Characters that have a meaning within a string, within an object, and before an object begins.
_IN_STRING = re.compile(r'"|\\(?s:.)')
_IN_OBJECT = re.compile(r'["{}\[\]<]')
_BEFORE = re.compile(r"\S")
USUAL_KEYS = ("name", "arguments")
_STRING = r'("(?:[^"\\]|\\.)*")'
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')


class JsonCallReader:
    """Push text until `is_over`; then `rest` is the text after the call. If the text is not a call by `rules`, `is_bad`
    is set, and `text` is content. With a `name`, the text is only the arguments. `keys` are the keys of name and
    arguments; None means that the name is the key of the arguments. The written part of an incomplete call is reported,
    unless `end`, the markup after a call, is empty or in the text."""

    def __init__(
        self,
        number: int,
        rules: CallRules = ANY_CALL,
        name: str | None = None,
        keys: tuple[str, str] | None = USUAL_KEYS,
        end: str = "",
    ) -> None:
        self.number = number
        self._end_mark = end
        self._rules = rules
        self._name = name
        self._keys = keys
        self.is_over = False
        self.is_bad = False
        self.text = ""
        self.rest = ""
        self._text = ""
        self._position = 0  # number of processed characters
        self._depth = 0 if name is None else 1
        self._in_string = False
        self._shown: int | None = None  # position of the first unreported character of the arguments
        self._is_begun = False

    def push(self, text: str, is_last: bool = False) -> list[StreamDelta]:
        """Return the deltas that are certain after `text`. `is_last` marks the end of the output."""
        pieces: list[StreamDelta] = []
        self._text += text
        while not self.is_over and (found := self._marks.search(self._text, self._position)):
            self._position = found.start()
            self._look(found[0], pieces)
            self._position = found.end()
        if not self.is_over:
            self._pause(is_last, pieces)
        return pieces

    @property
    def _marks(self) -> re.Pattern[str]:
        if self._in_string:
            return _IN_STRING
        return _IN_OBJECT if self._depth > (self._name is not None) else _BEFORE

    def _pause(self, is_last: bool, pieces: list[StreamDelta]) -> None:
        """Report the arguments so far, because no more text is available."""
        end = len(self._text)
        self._tell(end, pieces)
        if is_last:
            self._end(end, pieces)
            return
        # A backslash at the end has a meaning only with the next character.
        self._position = end - (self._in_string and self._text.endswith("\\", self._position))
        if self._is_begun:  # reported text is not needed any more
            self._text, self._position = self._text[self._position :], 0
            self._shown = None if self._shown is None else len(self._text)

    def _look(self, char: str, pieces: list[StreamDelta]) -> None:
        """Process one character with a meaning; in strings, also an escaped character."""
        if self._in_string:
            self._in_string = char != '"'
        elif char == '"' and self._depth:
            self._in_string = True
        elif char in "{[" and (self._depth or char == "{"):
            self._depth += 1
            if self._depth == 2 and char == "{" and not self._is_begun:
                self._begin(pieces)
        elif char in "}]" and self._depth:
            self._depth -= 1
            if self._depth == 1 and self._name is not None:
                self._end(self._position + 1, pieces)
            elif self._depth == 1 and self._shown is not None:
                self._tell(self._position + 1, pieces)
                self._shown = None
            elif self._depth == 0:
                self._end(self._position + 1, pieces)
        elif char == "<" or not (self._depth > (self._name is not None) or char.isspace()):  # not JSON
            self._end(self._position, pieces)

    def _begin(self, pieces: list[StreamDelta]) -> None:
        """Begin the arguments at an inner object, if the name is known and the function may be called."""
        if self._rules.is_held:
            return
        head = _HEAD.fullmatch(self._text, 0, self._position + 1) if self._keys == USUAL_KEYS else None
        name = self._name or (_decoded(head[1]) if head is not None else None)
        if isinstance(name, str) and self._rules.allow(name):
            self._is_begun, self._shown = True, self._position
            pieces.append(ToolCallStart(self.number, name, new_call_id()))

    def _tell(self, end: int, pieces: list[StreamDelta]) -> None:
        if self._shown is not None and end > self._shown:
            pieces.append(CallArguments(self.number, self._text[self._shown : end]))
            self._shown = end

    def _end(self, end: int, pieces: list[StreamDelta]) -> None:
        """Handle the end of the object before `end`, whether the object is complete or not."""
        self._tell(end, pieces)
        self.is_over, self._shown = True, None
        self.rest = self._text[end:]
        if self._is_begun:
            return
        text = self._text[:end]
        call = self._whole(text) if self._name is None else _arguments_alone(self._name, text)
        if call is None and end == len(self._text) and self._depth and self._end_mark and self._end_mark not in text:
            call = self._cut(text)
        if call is None or not self._rules.allow(call[0]):
            self.is_bad, self.text = True, text
            return
        pieces += [ToolCallStart(self.number, call[0], new_call_id()), CallArguments(self.number, call[1])]

    def _cut(self, text: str) -> tuple[str, str] | None:
        """Return name and arguments of a call that is cut off within its arguments; None if it is not a call."""
        if self._name is not None:
            return self._name, text.strip()
        name, key = self._keys or ("", "")
        head = _HEAD if self._keys == USUAL_KEYS else _head_of(name, key)
        found = head.match(text)
        called = None if found is None else _decoded(found[1])
        return None if found is None or not isinstance(called, str) else (called, text[found.end() - 1 :])

    def _whole(self, text: str) -> tuple[str, str] | None:
        if self._keys is None:
            fields: dict[str, dict[str, Any]] = _decoded(text.strip(), dict[str, dict[str, Any]]) or {}
            if len(fields) != 1:
                return None
            ((name, value),) = fields.items()
            return name, json.dumps(value, ensure_ascii=False)
        return _whole_call(text, *self._keys)


def _head_of(name: str, arguments: str) -> re.Pattern[str]:
    """Return a pattern for the text before the arguments of a call with these keys. With an empty key, the function's
    name is the key."""
    if not name:
        return re.compile(r"\s*\{\s*" + _STRING + r"\s*:\s*\{")
    others = rf'(?:"(?!{re.escape(name)}")\w+"\s*:\s*"[^"]*"\s*,\s*)*'
    own, key = (rf'"{re.escape(each)}"\s*:\s*' for each in (name, arguments))
    return re.compile(r"\s*\{\s*" + others + own + _STRING + r"\s*,\s*" + key + r"\{")


def _whole_call(text: str, name_key: str, arguments_key: str) -> tuple[str, str] | None:
    """Return name and arguments of a complete call in any layout. The arguments keep their spelling."""
    fields: dict[str, msgspec.Raw] = _decoded(text.strip(), dict[str, msgspec.Raw]) or {}
    name = _decoded(bytes(fields.get(name_key, b"null")))
    found = (fields[key] for key in (arguments_key, "arguments", "parameters") if key in fields)
    arguments = bytes(next(found, b"{}")).decode().strip()
    value = _decoded(arguments)
    if isinstance(value, str):  # JSON in a JSON string
        arguments, value = value.strip(), _decoded(value)
    return (name, arguments) if isinstance(name, str) and isinstance(value, dict) else None


def _arguments_alone(name: str, text: str) -> tuple[str, str] | None:
    """Return name and arguments, if the text is a JSON object with the arguments alone; else None."""
    return (name, text.strip()) if isinstance(_decoded(text.strip()), dict) else None


def _decoded(text: str | bytes, kind: Any = Any) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError):
        return None
