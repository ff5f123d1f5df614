"""Deltas that parsers find in growing output: reasoning, content, the beginning of a call, and more of its
arguments."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from bridle.outputs import ChatMessage, ToolCall


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer that is not a call."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the model's reasoning, before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of a call of the function `name`. Calls of an output are numbered from 0."""

    number: int
    name: str
    id: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More JSON text of a call's arguments."""

    number: int
    text: str


StreamDelta = Thought | Content | ToolCallStart | CallArguments


@dataclass(frozen=True, slots=True)
class CallRules:
    """Rules for recognizing a call. `names` are the functions that may be called (None: any). `is_held` is set if no
    grammar enforces the format: a call is then reported once it is complete, and an invalid call is content. `schemas`
    are the parameters of functions, for formats that write strings without quotes. With `tells_cut`, the complete part
    of a call that the end of the output cut off is reported; otherwise such a call is content."""

    names: frozenset[str] | None = None
    is_held: bool = False
    schemas: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    tells_cut: bool = True

    def allow(self, name: str) -> bool:
        return self.names is None or name in self.names


ANY_CALL = CallRules()


class ToolReader(Protocol):
    """Separates calls from other text in growing output. The joined result does not depend on how the text is split."""

    def push(self, text: str, is_last: bool = False) -> list[StreamDelta]:
        """Return the deltas that are certain after `text`."""
        raise NotImplementedError


@dataclass(slots=True)
class ParsedMessage(ChatMessage):
    """An answer that is built from deltas."""

    def add(self, pieces: Iterable[StreamDelta]) -> ParsedMessage:
        for piece in pieces:
            match piece:
                case Thought():
                    self.thoughts += piece.text
                case Content():
                    self.content += piece.text
                case ToolCallStart():
                    self.calls.append(ToolCall(piece.name, piece.id))
                case CallArguments():
                    self.calls[piece.number].arguments += piece.text
        return self


def new_call_id() -> str:
    """Return a unique call id of nine letters and digits, because the templates of some models accept no other ids."""
    return "".join(secrets.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(9))


def own_id(given: object) -> object:
    """Return a call id in the form that `new_call_id` made, without the prefix of an API."""
    return given.removeprefix("toolu_").removeprefix("call_") if isinstance(given, str) else given


def held_back(text: str, mark: str) -> int:
    """Return the number of last characters of `text` that may be the beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
