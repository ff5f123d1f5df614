"""Decides which sequences end after a failed step, and which continue.

To find the request that made a step fail, the sequences of that step are run one at a time. The loss of the device
preempts all sequences, because its cause is usually not a request. But a request may crash the device repeatedly. So
after two losses in a row, the sequences that were computed run alone too. A sequence ends if it loses the device again
while it runs alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from bridle.engine.sequence import Sequence
from bridle.errors import ShardUnavailable

#: Number of losses in a row after which a sequence that ran alone in the last of them ends.
_MAX_LOSSES = 3
#: Number of losses in a row after which every sequence that was computed in one of them ends.
_MAX_LOSSES_OF_ALL = 6


class FaultIsolator:
    """Remembers losses of the device between steps."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._suspects: dict[int, Sequence] = {}  # sequences to run alone because the device was lost

    def judge(self, computed: list[Sequence], error: Exception) -> tuple[list[Sequence], list[Sequence]]:
        """Judge a failed step over `computed`. Returns the sequences that end with its error, and those to
        run alone."""
        if not isinstance(error, ShardUnavailable):
            return (computed, []) if len(computed) == 1 else ([], computed)
        self._in_a_row += bool(computed)
        failed: list[Sequence] = []
        if len(computed) == 1 or self._in_a_row > 1:
            self._suspects.update((seq.id, seq) for seq in computed)
        if self._in_a_row >= _MAX_LOSSES_OF_ALL:
            failed = [seq for seq in self._suspects.values() if not seq.is_finished]
        elif self._in_a_row >= _MAX_LOSSES and len(computed) == 1:
            failed = computed
        self._acquit(failed)
        return failed, [seq for seq in self._suspects.values() if not seq.is_finished]

    def clear(self, computed: Iterable[Sequence]) -> None:
        """Record that a step over `computed` succeeded."""
        self._in_a_row = 0
        if self._suspects:
            self._acquit(computed)
            self._acquit([seq for seq in self._suspects.values() if seq.is_finished])

    def _acquit(self, sequences: Iterable[Sequence]) -> None:
        """Record that these sequences need not run alone any more."""
        for seq in sequences:
            self._suspects.pop(seq.id, None)
