"""Decides which sequences end after a failed step and which continue.

To find the request that made a step fail, the step's sequences run again, one at a time. The loss of the device
preempts all sequences, because its cause is usually not a request. But a request may crash the device repeatedly. So
after two losses in a row, the sequences of the last lost step also run one at a time. A sequence ends if the device is
lost again while the sequence runs alone.
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
    """Remembers losses of the device across steps."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._suspects: dict[int, Sequence] = {}  # sequences to run alone because the device was lost

    def judge(self, computed: list[Sequence], error: Exception) -> tuple[list[Sequence], list[Sequence]]:
        """Decide about the sequences of `computed` after their step failed. Returns the sequences that end with the
        error, and the sequences that must run alone."""
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
        """Record that a step with the sequences of `computed` succeeded."""
        self._in_a_row = 0
        if self._suspects:
            self._acquit(computed)
            self._acquit([seq for seq in self._suspects.values() if seq.is_finished])

    def _acquit(self, sequences: Iterable[Sequence]) -> None:
        """Record that the given sequences no longer need to run alone."""
        for seq in sequences:
            self._suspects.pop(seq.id, None)
