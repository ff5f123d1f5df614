"""Lets an event loop serve its connections between tasks that have much to write.

A step of the engine gives events to all streams at once. The tasks that write these streams become ready together. The
event loop runs all ready tasks before it reads from or accepts any connection. An event may take long to write, for
example with a hundred log-probabilities. The event loop then reads nothing until all streams are written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

#: Seconds in one round of the event loop after which further tasks wait for the next round.
SLICE = 0.01


class LoopPace:
    """Divides the rounds of an event loop among tasks. `clock` measures time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop whose round is in progress
        self._began = 0.0

    async def wait(self) -> None:
        """Return at once. If the tasks of this round of the event loop have used up its time, return in a later round.
        Tasks keep their order."""
        loop = asyncio.get_running_loop()
        while self._loop is loop and self._clock() - self._began > SLICE:  # noqa: ASYNC110 - for the next round
            await asyncio.sleep(0)
        if self._loop is not loop:
            self._loop, self._began = loop, self._clock()
            loop.call_soon(self._end_round)

    def _end_round(self) -> None:
        self._loop = None
