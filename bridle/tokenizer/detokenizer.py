"""Converts the tokens of outputs to text for the engine, token by token."""

from __future__ import annotations

from array import array
from codecs import utf_8_decode
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from bridle.tokenizer.token_table import TokenTable
from bridle.tokenizer.windowed_detokenizer import WindowText

if TYPE_CHECKING:
    from bridle.tokenizer.tokenizer import Tokenizer

_NONE: frozenset[int] = frozenset()
_LONGEST_CHARACTER = 4  # bytes of UTF-8


class Detokenizer:
    """Implements `bridle.engine.interfaces.TextDecoder` for a tokenizer.

    Property: the text that a state returns, `flush` included, equals `decode` of prompt and output, without `decode` of
    the prompt as its prefix. A character that begins in the prompt and ends in the output belongs to the output.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids
        self._table = tokenizer.table

    def open(self, prompt: Sequence[int], skip_special_tokens: bool) -> ByteText | WindowText:
        """Return the state for an output that follows `prompt`."""
        skipped = self._skipped if skip_special_tokens else _NONE
        if self._table is not None:
            return ByteText(self._table, prompt, skipped)
        return WindowText(self._decode_visible, prompt, skipped)

    def token_text(self, token: int) -> str:
        """Return the text of a token by itself. Incomplete characters become U+FFFD."""
        text = self._table.texts[token] if self._table is not None and 0 <= token < len(self._table.texts) else None
        return self._tokenizer.token_text(token) if text is None else text

    def tokens_of(self, text: str) -> list[int]:
        """Return tokens that spell `text` inside of an output."""
        return self._tokenizer.encode_inside(text)

    def _decode_visible(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


class ByteText:
    """The text of a growing output, for vocabularies with a table of bytes (see `token_table`). Implements
    `bridle.engine.interfaces.TextState`. Tokens in `skipped` leave no text.

    A token of complete characters costs one list look-up. Bytes that may begin a character wait until the character is
    complete. Tokens can be rolled back. For this, only positions with waiting bytes, or at the special beginning of a
    text, are stored. The state at other positions is recomputed from the number of characters of each token.
    """

    def __init__(self, table: TokenTable, prompt: Sequence[int], skipped: AbstractSet[int]) -> None:
        self._table = table
        self._prompt = prompt
        self._skipped = skipped
        self._texts = table.texts
        self._lengths = array("i")  # characters that became certain with each token
        self._unusual: dict[int, tuple[bytes, int]] = {}  # by number of tokens: waiting bytes, lead
        self._waiting = b""
        self._lead = 0
        self._restart(len(prompt))

    @property
    def is_waiting(self) -> bool:
        """Return whether the last token ends inside of a character."""
        return bool(self._waiting)

    def push(self, token: int) -> str:
        """Append a token. Return the characters that became certain."""
        text: str | None
        if token in self._skipped or not 0 <= token < len(self._texts):
            text = ""
        else:
            text = self._texts[token]
            if text is None or self._waiting or self._lead:
                text = self._push_slowly(token, text)
        self._lengths.append(len(text))
        if self._waiting or self._lead:
            self._unusual[len(self._lengths)] = (self._waiting, self._lead)
        return text

    def rewind(self, num_tokens: int) -> int:
        """Roll back the last tokens, which may include tokens of the prompt. Return how many of the returned characters
        disappear."""
        kept = len(self._lengths) - num_tokens
        size = max(kept, 0)
        gone = sum(self._lengths[size:])
        del self._lengths[size:]
        self._unusual = {at: state for at, state in self._unusual.items() if at <= size}
        if kept < 0:
            self._restart(max(len(self._prompt) + kept, 0))
        self._waiting, self._lead = self._unusual.get(size, (b"", 0))
        return gone

    def flush(self) -> str:
        """End the text. Return U+FFFD if the last character is incomplete, else an empty string."""
        text, _ = utf_8_decode(self._waiting, "replace", True)
        self._waiting = b""
        return text

    def copy(self) -> ByteText:
        """Return an independent copy."""
        twin = ByteText.__new__(ByteText)
        twin._table, twin._prompt, twin._skipped = self._table, self._prompt, self._skipped
        twin._texts = self._texts
        twin._lengths = self._lengths[:]
        twin._unusual = dict(self._unusual)
        twin._waiting, twin._lead = self._waiting, self._lead
        return twin

    def _push_slowly(self, token: int, text: str | None) -> str:
        """Return the characters that become certain with a token in an unusual case. The token has incomplete
        characters (`text` is None), bytes wait, or the text is at its special beginning."""
        if self._lead and self._table.drops_in_first:
            data, self._lead = self._table.first_bytes(token), 0
        else:
            data = self._table.raw[token] if text is None else text.encode("utf-8")
        data = self._waiting + data
        text, used = utf_8_decode(data, "replace", False)
        self._waiting = data[used:]
        if self._lead:
            text, self._lead = self._table.strip(text, self._lead)
        return text

    # -- state after the prompt ------------------------------------------------------------------------------

    def _restart(self, num_prompt: int) -> None:
        """Restart after the first `num_prompt` tokens of the prompt."""
        self._prompt = self._prompt[:num_prompt]
        self._waiting = self._unfinished()
        self._lead = self._lead_after_prompt() if self._table.initial_lead else 0
        self._unusual = {0: (self._waiting, self._lead)} if self._waiting or self._lead else {}

    def _unfinished(self) -> bytes:
        """Return the bytes at the end of the prompt that may begin a character."""
        tail = b""
        for token in reversed(self._prompt):
            if token in self._skipped or not 0 <= token < len(self._texts):
                continue
            if self._texts[token]:
                break  # complete characters, so no earlier bytes wait
            tail = self._table.raw.get(token, b"") + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        tail = tail[-_LONGEST_CHARACTER:]
        return tail[utf_8_decode(tail, "replace", False)[1] :]

    def _lead_after_prompt(self) -> int:
        lead = self._table.initial_lead
        for token in self._prompt:
            if not lead:
                break
            if token in self._skipped:
                continue
            if self._table.drops_in_first:
                return 0
            text = self._table.bytes_of(token).decode("utf-8", "replace")
            lead = self._table.strip(text, lead)[1]
        return lead
