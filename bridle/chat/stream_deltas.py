"""Deltas that parsers find in a growing output: reasoning, content, the beginning of a call, more of its arguments."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from bridle.outputs import ChatMessage, ToolCall


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the model's reasoning, before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The model calls the function `name`. Calls of an output are numbered from 0."""

    number: int
    name: str
    id: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    number: int
    text: str


StreamDelta = Thought | Content | ToolCallStart | CallArguments


@dataclass(frozen=True, slots=True)
class CallRules:
    """Rules for recognizing a call. `names` are those of the functions that may be called (None: any). Where no grammar
    ensures the form of the text, a call `is_held`: reported once it is complete, and content if it turns out not to be
    a call. `schemas` are the parameters of functions, for formats that write strings without quotes. With `tells_cut` a
    call that the end of the output cuts off is reported as far as it was written, else it is content."""

    names: frozenset[str] | None = None
    is_held: bool = False
    schemas: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    tells_cut: bool = True

    def allow(self, name: str) -> bool:
        return self.names is None or name in self.names


ANY_CALL = CallRules()


class ToolReader(Protocol):
    """Tells calls from other text while it grows. All pieces together give the same result however the text is cut."""

    def push(self, text: str, is_last: bool = False) -> list[StreamDelta]:
        """Return the deltas that `text` makes certain."""
        raise NotImplementedError


@dataclass(slots=True)
class ParsedMessage(ChatMessage):
    """Pieces put together."""

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
    """An id that no other call has. Nine letters and digits: some models' templates take nothing else."""
    return "".join(secrets.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(9))


def own_id(given: object) -> object:
    """The id of a call as `new_call_id` made it, without the prefix of an API."""
    return given.removeprefix("toolu_").removeprefix("call_") if isinstance(given, str) else given


def held_back(text: str, mark: str) -> int:
    """Return the number of last characters of `text` that may be the beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
