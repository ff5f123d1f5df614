"""Interfaces for decoding tokens to text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TextState(Protocol):
    """The text of one growing output. A fork of the output gets a copy of its text."""

    @property
    def is_waiting(self) -> bool:
        """Return True if the last token ends inside of a character, whose other bytes are still missing."""

    def push(self, token: int) -> str:
        """Append a token. Returns the characters that are now complete."""

    def rewind(self, num_tokens: int) -> int:
        """Roll back the last `num_tokens` tokens. Returns how many returned characters are removed."""

    def flush(self) -> str:
        """End the text. Returns the characters that were not returned yet. An unfinished character becomes U+FFFD."""

    def copy(self) -> TextState: ...


class TextDecoder(Protocol):
    """Converts tokens to text."""

    def open(self, prompt: Sequence[int], skip_special_tokens: bool) -> TextState:
        """Return the decoding state of an output that follows `prompt`."""

    def token_text(self, token: int) -> str:
        """Return the text of one token by itself, for display."""

    def tokens_of(self, text: str) -> Sequence[int]:
        """Return tokens that spell `text` in the middle of an output."""
