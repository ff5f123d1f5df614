"""Who is to blame for a step that failed, and who goes on.

A fault of a step is pinned on its request by running the sequences of that step one at a time. The loss of the device
is a preemption of everybody: it comes from outside, as a rule. But a request that makes the device die would take it
down again and again. So after a second loss in a row the sequences that were computed are run alone as well, and one
that loses the device once more when it is alone ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from bridle.engine.sequence import Sequence
from bridle.errors import ShardUnavailable

#: After so many losses in a row a sequence that was alone in the last of them ends.
_MAX_LOSSES = 3
#: After so many, everybody ends who was there in one of them.
_MAX_LOSSES_OF_ALL = 6


class Blame:
    """Remembers losses of the device between steps."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._suspects: dict[int, Sequence] = {}  # those to be run alone because the device was lost

    def judge(self, computed: list[Sequence], error: Exception) -> tuple[list[Sequence], list[Sequence]]:
        """A step over `computed` failed: those that end with its error, and those to be run alone."""
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
        """A step over `computed` went well."""
        self._in_a_row = 0
        if self._suspects:
            self._acquit(computed)
            self._acquit([seq for seq in self._suspects.values() if seq.is_finished])

    def _acquit(self, sequences: Iterable[Sequence]) -> None:
        """These are no longer run alone."""
        for seq in sequences:
            self._suspects.pop(seq.id, None)
