"""A clock that tests give to the engine in place of the system's clock. The clock's time moves only when a test
advances it. So tests of deadlines need not wait."""

from __future__ import annotations

import threading
from typing import Protocol


class Clock(Protocol):
    """A clock. Calling the clock returns seconds; `wait_until` waits for a time."""

    def __call__(self) -> float: ...
    def wait_until(self, moment: float) -> None: ...


class FakeClock:
    """A clock whose time moves only by `advance` and `wait_until`. Safe from several threads."""

    def __init__(self, now: float = 1_000.0) -> None:
        self._now = now
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            return self._now

    def advance(self, seconds: float) -> None:
        """Advance the time by `seconds`. A negative number raises `ValueError`."""
        if seconds < 0:
            raise ValueError(f"cannot advance by {seconds} seconds")
        with self._lock:
            self._now += seconds

    def wait_until(self, moment: float) -> None:
        """Set the time to `moment`, unless that time has already passed."""
        with self._lock:
            self._now = max(self._now, moment)
