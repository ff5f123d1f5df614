"""Interfaces for decoding tokens to text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TextState(Protocol):
    """The text of one growing output. It is copied on a fork."""

    @property
    def is_waiting(self) -> bool:
        """Return whether the last token ends inside of a character, whose other bytes are still to come."""
        raise NotImplementedError

    def push(self, token: int) -> str:
        """Append a token; returns the characters that became certain."""
        raise NotImplementedError

    def rewind(self, num_tokens: int) -> int:
        """Take the last tokens back; returns how many of the returned characters disappear."""
        raise NotImplementedError

    def flush(self) -> str:
        """End the text; returns what is left (an unfinished character becomes U+FFFD)."""
        raise NotImplementedError

    def copy(self) -> TextState: ...


class TextDecoder(Protocol):
    """Tokens to text."""

    def open(self, prompt: Sequence[int], skip_special_tokens: bool) -> TextState:
        """State for output that follows `prompt`."""
        raise NotImplementedError

    def token_text(self, token: int) -> str:
        """Return the text of one token by itself, for display."""
        raise NotImplementedError

    def tokens_of(self, text: str) -> Sequence[int]:
        """Tokens that spell `text` inside of an output."""
        raise NotImplementedError
