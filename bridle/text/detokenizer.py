"""Converts tokens to text, one output at a time, for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bridle.text.byte_text import ByteText
from bridle.text.window_text import WindowText

if TYPE_CHECKING:
    from bridle.text.tokenizer import Tokenizer

_NONE: frozenset[int] = frozenset()


class Detokenizer:
    """Implements `bridle.engine.interfaces.TextDecoder` for a tokenizer.

    Law: the text that a state returns, with its flush, is `decode` of prompt and output without `decode` of the prompt;
    a character that begins in the prompt and ends in the output belongs to the output.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids
        self._table = tokenizer.table

    def open(self, prompt: Sequence[int], skip_special_tokens: bool) -> ByteText | WindowText:
        """State for output that follows `prompt`."""
        skipped = self._skipped if skip_special_tokens else _NONE
        if self._table is not None:
            return ByteText(self._table, prompt, skipped)
        return WindowText(self._decode_visible, prompt, skipped)

    def token_text(self, token: int) -> str:
        """What a token spells by itself; bytes that are no whole characters show as U+FFFD."""
        text = self._table.texts[token] if self._table is not None and 0 <= token < len(self._table.texts) else None
        return self._tokenizer.token_text(token) if text is None else text

    def _decode_visible(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)
