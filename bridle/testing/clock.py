"""A clock that tests hand to the engine in place of the system's. Time moves only when a test advances it: deadlines
are tested without waiting."""

from __future__ import annotations

import threading
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
