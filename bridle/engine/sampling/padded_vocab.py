"""Token ids without a token. Ids without a token are gaps in the vocabulary, or ids past its end if the model's logits
are longer.

A model accepts ids without a token in prompts, but these ids are never sampled. This module uses no tokenizer;
`bridle.serving.models.vocab_checks` finds the ids.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from bridle.engine.control.decision import mask_allows


@dataclass(frozen=True, slots=True)
class PaddedVocab:
    """`spans` are the ranges of ids without a token, in order. Each range is stored as its first id, and one past its
    last id."""

    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, tokens: Iterable[int]) -> PaddedVocab:
        """Return the spans of a set of ids, which may be in any order."""
        spans: list[tuple[int, int]] = []
        for token in sorted(set(tokens)):
            first = spans.pop()[0] if spans and spans[-1][1] == token else token
            spans.append((first, token + 1))
        return cls(tuple(spans))

    @classmethod
    def from_bounds(cls, bounds: Sequence[int]) -> PaddedVocab:
        """Return the spans from the flat list that `bounds` returned. Raises `ValueError` for invalid bounds."""
        if len(bounds) % 2 or any(a >= b for a, b in pairwise(bounds)):
            raise ValueError(f"the {len(bounds)} bounds of unused token ids are not pairs of bounds in ascending order")
        return cls(tuple(zip(bounds[::2], bounds[1::2], strict=True)))

    @property
    def bounds(self) -> tuple[int, ...]:
        """Return the bounds of all spans as one flat list: first id, one past the last, and so on."""
        return tuple(chain.from_iterable(self.spans))

    @property
    def end(self) -> int:
        """Return one past the last id without a token; 0 if all ids have tokens."""
        return self.spans[-1][1] if self.spans else 0

    def __bool__(self) -> bool:
        return bool(self.spans)

    def __contains__(self, token: int) -> bool:
        at = bisect_right(self.spans, token, key=_first)
        return at > 0 and token < self.spans[at - 1][1]

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(range(*span) for span in self.spans)

    def among(self, tokens: Iterable[int]) -> set[int]:
        """Return the ids among `tokens` that have no token."""
        return set(self).intersection(tokens) if self.spans else set()

    def end_of(self, vocab_size: int) -> int:
        """Return one past the last id below `vocab_size` that has a token."""
        return self.spans[-1][0] if self.spans and self.end >= vocab_size else vocab_size

    def resized(self, vocab_size: int, known: int) -> PaddedVocab:
        """Return the ids without a token for a model with `vocab_size` ids. Ids from `known` on have no token."""
        return PaddedVocab.of(chain((token for token in self if token < known), range(known, vocab_size)))

    def bar(self, mask: bytes, vocab_size: int) -> bool:
        """Return whether `mask` allows only ids without a token. Only ids below `vocab_size` count (padding bits do
        not)."""
        allowed = mask.lstrip(b"\0")
        first = 8 * (len(mask) - len(allowed))
        if any(mask_allows(mask, token) and token not in self for token in range(first, min(first + 8, vocab_size))):
            return False  # this already decides nearly every mask
        bits = int.from_bytes(mask, "little") & ((1 << vocab_size) - 1)
        for first, end in self.spans:
            bits &= ~(((1 << (end - first)) - 1) << first)
        return not bits


#: Each id has a token.
NONE_UNNAMED = PaddedVocab()


def _first(span: tuple[int, int]) -> int:
    return span[0]
