"""Pairs of tokens that a tokenizer writes one after the other.

A tokenizer of merges writes a sequence of tokens if it writes each neighbouring pair so. A pair is tried alone, then in
contexts in which tokenizers split texts before they merge. Pairs and masks are computed when they are first needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from bridle.engine.control.decision import mask_of

#: A mask of more tokens is not filtered: a token that is sampled is tried instead.
MAX_FILTERED = 128
#: The most pairs that are remembered.
_MAX_PAIRS = 1 << 17
#: The most masks that are remembered, of up to 32 kB each.
_MAX_MASKS = 256
#: Texts around a pair between whose tokens a tokenizer may split before it merges.
_AROUND = (
    *((left, "") for left in ("", "`", "~", "*", "=", "(", " ", "a")),
    ("", "a"),
    ("", "1"),
    ("", " a"),
    ("", "-" * 28),
)


class Spelling(Protocol):
    """The part of a vocabulary that spells texts."""

    @property
    def special(self) -> Collection[int]: ...

    def text_of(self, tokens: Sequence[int]) -> bytes: ...

    def written(self, text: str) -> list[int]: ...


class CanonicalPairs:
    """Pairs of tokens of a vocabulary that may follow one another."""

    def __init__(self, vocabulary: Spelling) -> None:
        self._vocabulary = vocabulary
        self._known: dict[tuple[int, int], bool] = {}
        self._masks: dict[tuple[int, bytes], tuple[bytes | None, tuple[int, ...]]] = {}

    def has(self, first: int, second: int) -> bool:
        """Return whether the tokenizer may write `second` after `first`."""
        known = self._known.get((first, second))
        if known is None:
            known = self._is_pair(first, second)
            if len(self._known) >= _MAX_PAIRS:
                self._known.clear()
            self._known[first, second] = known
        return known

    def filtered(self, last: int, mask: bytes) -> tuple[bytes | None, tuple[int, ...]]:
        """The part of a small mask that may come after `last`, and its tokens; None for a large mask."""
        known = self._masks.get((last, mask))
        if known is None:
            row = int.from_bytes(mask, "little")
            known = None, ()
            if row.bit_count() <= MAX_FILTERED:
                tokens = tuple(token for token in _tokens_of(row) if self.has(last, token))
                known = mask_of(tokens, 8 * len(mask)), tokens
            if len(self._masks) >= _MAX_MASKS:
                self._masks.clear()
            self._masks[last, mask] = known
        return known

    def _is_pair(self, first: int, second: int) -> bool:
        special = self._vocabulary.special
        if first in special or second in special:
            return True
        try:
            texts = tuple(self._vocabulary.text_of((token,)).decode() for token in (first, second))
        except UnicodeDecodeError:
            return True  # a part of a character has no text of its own
        return any(self._is_written(first, second, left + texts[0], texts[1] + right) for left, right in _AROUND)

    def _is_written(self, first: int, second: int, head: str, tail: str) -> bool:
        """Return whether the tokens of two joined texts are `first` and `second` where these meet."""
        tokens = self._vocabulary.written(head + tail)
        meeting, size = len(head.encode()), 0
        for place, token in enumerate(tokens):
            if size == meeting:
                return place > 0 and (tokens[place - 1], token) == (first, second)
            size += len(self._vocabulary.text_of((token,)))
        return size != len((head + tail).encode())  # it changes the text, so nothing is known


def _tokens_of(row: int) -> Iterator[int]:
    while row:
        yield (row & -row).bit_length() - 1
        row &= row - 1
