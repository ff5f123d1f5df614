"""Virtual time: scheduled calls, run in the order of their time. The timeline never waits: simulating a day takes only
as long as its calls."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from bridle.errors import InternalError


class Timeline:
    """Fake clock in seconds. The clock advances to the time of the next scheduled call. Calls at the same time run in
    the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_calls = 0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._is_stopped = False

    def __call__(self) -> float:
        return self.now

    def at(self, moment: float, call: Callable[..., None], *args: Any) -> None:
        """Run `call(*args)` when `moment` comes. Raises `InternalError` if `moment` has passed."""
        if moment < self.now:
            raise InternalError(f"something is to happen at {moment:.6f} s, and it is {self.now:.6f} s already")
        heapq.heappush(self._due, (moment, next(self._order), call, args))

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        """Run `call(*args)` after `seconds` of virtual time."""
        self.at(self.now + seconds, call, *args)

    def stop(self) -> None:
        """Stop before the next scheduled call."""
        self._is_stopped = True

    def run(self) -> None:
        """Run all scheduled calls until none is left, or `stop` is called."""
        while self._due and not self._is_stopped:
            self.now, _, call, args = heapq.heappop(self._due)
            self.num_calls += 1
            call(*args)


class LocalClock:
    """The clock inside one replica. During a step, this clock is ahead of the timeline, because the step's end is in
    the future."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
