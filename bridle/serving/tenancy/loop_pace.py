"""Lets an event loop look at its connections between tasks that have much to write.

A step of the engine gives events to all streams at once. Their tasks become ready together, and a loop runs all ready
tasks before it reads or accepts anything. Where an event costs much, as with a hundred log-probabilities, that takes as
long as all streams together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

#: Seconds of one round of the loop after which tasks wait for the next one.
SLICE = 0.01


class LoopPace:
    """Shares out the rounds of an event loop. `clock` measures time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None  # whose round is under way
        self._began = 0.0

    async def wait(self) -> None:
        """Return at once, or in a later round if tasks have used up this one. Tasks keep their order."""
        loop = asyncio.get_running_loop()
        while self._loop is loop and self._clock() - self._began > SLICE:  # noqa: ASYNC110 - for the next round
            await asyncio.sleep(0)
        if self._loop is not loop:
            self._loop, self._began = loop, self._clock()
            loop.call_soon(self._end_round)

    def _end_round(self) -> None:
        self._loop = None
