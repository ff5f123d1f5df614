"""Scales of the control vectors of one sequence, for each position.

A control vector adds a direction to the hidden states of each token. So the KV of a token depends on the scales at its
position. The scales are stored for every position. So a token that is computed again, after a preemption or in another
chunk, gets the same scales. A rollback of tokens also undoes the changes of scales that began with these tokens.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter

#: Vectors with their scales, by key, without zeros and in the order of keys.
Mix = tuple[tuple[str, float], ...]

#: Vectors by key along which hidden states are read, each with a layer, or None for the last one.
Probes = tuple[tuple[str, int | None], ...]

_MARK = b"control vectors"


@dataclass(frozen=True, slots=True)
class VectorSpan:
    """The control vectors of `length` tokens of a row in a step's plan, from the offset `offset` on."""

    offset: int
    length: int
    mix: Mix


@dataclass(frozen=True, slots=True)
class VectorScales:
    """Scales of the control vectors of one sequence. `keys` maps the names in the request to the keys of loaded
    vectors. `runs` are pairs of a position and the scales by name from that position on; the first position is 0."""

    keys: Mapping[str, str]
    runs: tuple[tuple[int, Mapping[str, float]], ...]

    @classmethod
    def of(cls, keys: Mapping[str, str], scales: Mapping[str, float]) -> VectorScales:
        """Return scales that hold at all positions."""
        return cls(keys, ((0, dict(scales)),))

    def changed(self, position: int, scales: Mapping[str, float]) -> VectorScales:
        """Return the scales with changes from `position` on, which is the end of the sequence. Vectors that `scales`
        does not name keep their scales."""
        new = {**self.runs[-1][1], **scales}
        if new == self.runs[-1][1]:
            return self
        return VectorScales(self.keys, (*self.before(position).runs, (position, new)))

    def before(self, num_tokens: int) -> VectorScales:
        """Return the scales of the first `num_tokens` tokens. The scales of the last token among these also hold for
        later tokens."""
        if self.runs[-1][0] < num_tokens or len(self.runs) == 1:
            return self
        return VectorScales(self.keys, (self.runs[0], *(run for run in self.runs[1:] if run[0] < num_tokens)))

    def spans(self, start: int, end: int) -> tuple[VectorSpan, ...]:
        """Return the vectors of tokens `start .. end-1`; offsets count from `start`. Tokens without a control vector
        are in no span."""
        return tuple(
            VectorSpan(first - start, last - first, mix) for first, last, mix in self._parts(start, end) if mix
        )

    def marks(self, start: int, end: int) -> bytes:
        """Return bytes that differ between token ranges `start .. end-1` with different control vectors or scales. If
        the tokens have no control vector, the result is empty."""
        parts = [
            struct.pack("<qq", span.offset, span.length)
            + b"".join(struct.pack("<qd", len(key), scale) + key.encode() for key, scale in span.mix)
            for span in self.spans(start, end)
        ]
        return _MARK + b"".join(parts) if parts else b""

    def _parts(self, start: int, end: int) -> Iterator[tuple[int, int, Mix]]:
        number = bisect_right(self.runs, start, key=itemgetter(0)) - 1
        while start < end:
            until = self.runs[number + 1][0] if number + 1 < len(self.runs) else end
            scales = self.runs[number][1].items()
            yield start, min(until, end), tuple(sorted((self.keys[name], scale) for name, scale in scales if scale))
            start, number = until, number + 1
