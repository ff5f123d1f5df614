"""One call as JSON, `{"name": "f", "arguments": {...}}`, read while it grows.

The name is told as soon as the arguments begin, then the arguments as they come. Where the object is laid out
otherwise, it is told as a whole at its end.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from bridle.chat.tools.pieces import CallArguments, CallBegun, Piece, new_call_id

# What means something within a string, within an object, and before one begins.
_IN_STRING = re.compile(r'"|\\(?s:.)')
_IN_OBJECT = re.compile(r'["{}\[\]<]')
_BEFORE = re.compile(r"\S")
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')


class JsonCallReader:
    """Push text until `is_over`; then `rest` is what came after the call. A text that turns out not to be a call is
    `is_bad`, and `rest` is all of it. With a `name`, the text is the arguments alone."""

    def __init__(self, number: int, name: str | None = None) -> None:
        self.number = number
        self._name = name
        self.is_over = False
        self.is_bad = False
        self.rest = ""
        self._text = ""
        self._position = 0  # characters looked at
        self._depth = 0 if name is None else 1
        self._in_string = False
        self._shown: int | None = None  # where the arguments that were not told yet begin
        self._is_begun = False

    def push(self, text: str, is_last: bool = False) -> list[Piece]:
        """What became certain with `text`; with `is_last` nothing follows."""
        pieces: list[Piece] = []
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

    def _pause(self, is_last: bool, pieces: list[Piece]) -> None:
        """The text goes no further for now."""
        end = len(self._text)
        self._tell(end, pieces)
        if is_last:
            self._end(end, pieces)
            return
        # A backslash at the end has a meaning only with what follows.
        self._position = end - (self._in_string and self._text.endswith("\\", self._position))
        if self._is_begun:  # what was told is needed no more
            self._text, self._position = self._text[self._position :], 0
            self._shown = None if self._shown is None else len(self._text)

    def _look(self, char: str, pieces: list[Piece]) -> None:
        """One more character that means something; in strings, also one that is escaped."""
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
            if self._depth == 1 and self._shown is not None:
                self._tell(self._position + 1, pieces)
                self._shown = None
                if self._name is not None:
                    self._end(self._position + 1, pieces)
            elif self._depth == 0:
                self._end(self._position + 1, pieces)
        elif char == "<" or not (self._depth > (self._name is not None) or char.isspace()):  # never in JSON
            self._end(self._position, pieces)

    def _begin(self, pieces: list[Piece]) -> None:
        """An inner object begins: the arguments, if the name is known."""
        head = _HEAD.fullmatch(self._text, 0, self._position + 1)
        name = self._name or (_decoded(head[1]) if head is not None else None)
        if isinstance(name, str):
            self._is_begun, self._shown = True, self._position
            pieces.append(CallBegun(self.number, name, new_call_id()))

    def _tell(self, end: int, pieces: list[Piece]) -> None:
        if self._shown is not None and end > self._shown:
            pieces.append(CallArguments(self.number, self._text[self._shown : end]))
            self._shown = end

    def _end(self, end: int, pieces: list[Piece]) -> None:
        """The object ends before `end`, as it should or not."""
        self._tell(end, pieces)
        self.is_over, self._shown = True, None
        self.rest = self._text[end:]
        if self._is_begun:
            return
        call = None if self._name is not None else _whole_call(self._text[:end])
        if call is None:
            self.is_bad, self.rest = True, self._text
            return
        pieces += [CallBegun(self.number, call[0], new_call_id()), CallArguments(self.number, call[1])]


def _whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a complete call, however it is laid out."""
    value = _decoded(text.strip())
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON
        arguments = _decoded(arguments)
    if not isinstance(arguments, dict):
        return None
    return value["name"], msgspec.json.encode(arguments).decode()


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
