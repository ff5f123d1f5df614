"""Clocks that tests and benchmarks hand to the engine in place of the system's.

`FakeClock` stands still until told to move: deadlines are tested without waiting. `RealClock` has the same
face over the system's monotonic clock, so that a timed fake can be used for benchmarks.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Calling it gives seconds; `wait_until` lets the time come."""

    def __call__(self) -> float: ...

    def wait_until(self, moment: float) -> None: ...


class FakeClock:
    """Time that moves only by `advance` and `wait_until`. Safe to use from several threads."""

    def __init__(self, now: float = 1_000.0) -> None:
        self._now = now
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            return self._now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass; going back raises `ValueError`."""
        if seconds < 0:
            raise ValueError(f"cannot advance by {seconds} seconds")
        with self._lock:
            self._now += seconds

    def wait_until(self, moment: float) -> None:
        """Jump to `moment` unless it has passed already."""
        with self._lock:
            self._now = max(self._now, moment)


class RealClock:
    """The system's monotonic clock; `wait_until` sleeps."""

    def __call__(self) -> float:
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        """Sleep until `moment`, in seconds of this clock."""
        delay = moment - time.monotonic()
        if delay > 0:
            time.sleep(delay)
