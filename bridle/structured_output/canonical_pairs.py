"""Pairs of tokens that a tokenizer writes one after the other.

A tokenizer of merges writes a sequence of tokens if it writes each neighbouring pair so. A pair is tried alone, then in
contexts in which tokenizers split texts before they merge. Pairs and masks are computed when they are first needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bridle.engine.control.decision import mask_of

#: A mask of more tokens is not filtered: a token that is sampled is tried instead.
MAX_FILTERED = 128
#: The most pairs that are remembered.
_MAX_PAIRS = 1 << 17
#: The most masks that are remembered, of up to 32 kB each.
_MAX_MASKS = 256
#: So many bytes of a text say which token it begins with.
_HEAD = 32
#: The number of bits of each byte.
_BITS = np.array([byte.bit_count() for byte in range(256)], np.uint8)
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


@dataclass(frozen=True, slots=True)
class SmallMask:
    """The part `kept` of a mask that may come after a token, as a bit row and as `tokens`. The `doubtful` ones of
    these, with their texts, shorter ones first, begin other tokens that the mask allows: if their text must go on, the
    tokenizer may write one of those."""

    kept: bytes
    tokens: tuple[int, ...]
    doubtful: tuple[tuple[bytes, int], ...]


class CanonicalPairs:
    """Pairs of tokens of a vocabulary that may follow one another."""

    def __init__(self, vocabulary: Spelling) -> None:
        self._vocabulary = vocabulary
        self._known: dict[tuple[int, int], bool] = {}
        self._masks: dict[tuple[int, bytes, bytes], SmallMask] = {}
        self._heads: dict[bytes, tuple[int, ...]] = {}

    def has(self, first: int, second: int) -> bool:
        """Return whether the tokenizer may write `second` after `first`."""
        known = self._known.get((first, second))
        if known is None:
            known = self._is_pair(first, second)
            if len(self._known) >= _MAX_PAIRS:
                self._known.clear()
            self._known[first, second] = known
        return known

    def filtered(self, last: int, mask: bytes) -> SmallMask | None:
        """The part of a small mask that may come after `last`; None for a large mask. Only the words with tokens are
        remembered, because to hash a whole mask takes as long as to compute it."""
        row = np.frombuffer(mask, np.uint32)
        if np.count_nonzero(row) > MAX_FILTERED:
            return None
        places = row.nonzero()[0]
        words = row[places]
        key = last, places.tobytes(), words.tobytes()
        known = self._masks.get(key)
        if known is None:
            if int(_BITS[words.view(np.uint8)].sum()) > MAX_FILTERED:
                return None
            if len(self._masks) >= _MAX_MASKS:
                self._masks.clear()
            known = self._masks[key] = self._small_mask(last, mask)
        return known

    def _small_mask(self, last: int, mask: bytes) -> SmallMask:
        row = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        texts = {int(token): self._vocabulary.text_of((int(token),)) for token in row.nonzero()[0]}
        tokens = tuple(token for token in texts if self.has(last, token))
        doubtful = [(texts[token], token) for token in tokens if _begins_other(texts[token], texts.values())]
        return SmallMask(mask_of(tokens, 8 * len(mask)), tokens, tuple(sorted(doubtful)))

    def first_of(self, text: bytes, is_whole: bool) -> int | None:
        """The first token of a text that must come; None if it depends on what follows, because the text has one token
        and is not a whole one."""
        head = text[:_HEAD]
        tokens = self._heads.get(head)
        if tokens is None:
            if len(self._heads) >= _MAX_PAIRS:
                self._heads.clear()
            tokens = self._heads[head] = tuple(self._vocabulary.written(head.decode("utf-8", "ignore"))[:2])
        return tokens[0] if len(tokens) > 1 or (tokens and is_whole) else None

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


def _begins_other(text: bytes, others: Iterable[bytes]) -> bool:
    """Return whether one of the `others` begins with `text` and is longer."""
    return bool(text) and any(len(other) > len(text) and other.startswith(text) for other in others)
