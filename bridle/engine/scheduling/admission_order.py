"""Decides which waiting sequences are admitted, in which order, and when.

Sequences are ordered by priority level, but a lower level also gets its turn after a while. Within a level, sequences
are ordered by `Request.place`, which divides the level among the tenants. Among levels, the level with the earliest due
time comes first: arrival time of its oldest sequence, plus a delay for lower levels. The delay is a number of seconds
of waiting per level. So a request of a higher level may overtake one of a lower level only if it arrived at most that
much later. A sequence that is admitted before sequences of a higher level gets that higher level. So sequences of the
higher level do not preempt it at once.

Computing a prompt delays every running stream. So a prompt may have to wait until enough prompts are queued, or until
the streams have run long enough without a delay. `PrefillGate` decides how long a prompt waits, by counting steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from operator import attrgetter

from bridle.engine.sequence import Sequence as TokenSequence


def admission_order(waiting: Sequence[TokenSequence], seconds: float) -> list[TokenSequence]:
    """Return `waiting` in the order of admission. `waiting` must be sorted by level and then by urgency. A level is
    worth `seconds` seconds of waiting."""
    if not waiting or waiting[0].queue.level == waiting[-1].queue.level:
        return list(waiting)
    levels = [_dated(level, list(members), seconds) for level, members in groupby(waiting, attrgetter("queue.level"))]
    return [seq for _, _, seq in heapq.merge(*levels, key=lambda item: item[:2])]


def overtaken_levels(order: Sequence[TokenSequence]) -> list[int]:
    """Return, for each position in the order, the highest level (the smallest number) of the ready sequences from there
    on."""
    ready = [seq.queue.level if seq.is_ready else _NOBODY for seq in reversed(order)]
    return list(accumulate(ready, min))[::-1]


_NOBODY = 1 << 30


def _dated(level: int, members: list[TokenSequence], seconds: float) -> list[tuple[float, int, TokenSequence]]:
    """Return each sequence of a level with the due time that the level would have if that sequence were the first. The
    due times must increase, because merging needs sorted input."""
    ages = (seq.queue.queued_at or 0.0 for seq in reversed(members))
    oldest = reversed(list(accumulate(ages, min)))
    dates: Iterable[float] = (level * seconds + since for since in oldest)
    return [(date, level, seq) for date, seq in zip(dates, members, strict=True)]


class PrefillGate:
    """Admits prompts to a step if no sequence decodes, or if at least `ratio` times as many prompts are queued as
    sequences decode. After `max_steps` decoding steps in a row without a prompt, prompts are also admitted."""

    def __init__(self, ratio: float = 0.0, max_steps: int = 0) -> None:
        self.ratio = ratio
        self.max_steps = max_steps
        #: Whether prompts never wait, so that steps need not be counted.
        self.is_always_open = ratio == 0 or max_steps == 0
        self._num_steps = 0  # steps of decoding alone, in a row

    def is_open(self, num_queued: int, num_decoding: int) -> bool:
        """Return whether queued prompts may be admitted now."""
        if num_decoding == 0 or self._num_steps >= self.max_steps:
            return True
        return num_queued >= self.ratio * num_decoding

    def note(self, *, had_prompts: bool, had_decodes: bool) -> None:
        """Record whether a planned step computes prompts, and whether it decodes."""
        if had_prompts:
            self._num_steps = 0
        elif had_decodes:
            self._num_steps += 1
