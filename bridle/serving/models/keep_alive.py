"""Unloads a model some time after its last request, if a client has set such a time. If no time is set, a model stays
loaded until its memory is needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from bridle.serving.models.model_slot import Slot

#: Maximum time before unloading, in seconds: a month.
_MOST = 30 * 86_400.0


class Timer(Protocol):
    """A scheduled function call, which can be cancelled."""

    def cancel(self) -> None:
        """Cancel the call."""


def _call_later(seconds: float, call: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, call)


class KeepAlive:
    """Starts a timer for a slot when its last lease ends. `empty` unloads the idle model of a slot. All methods must be
    called in one event loop."""

    def __init__(
        self,
        empty: Callable[[Slot], Coroutine[Any, Any, None]],
        call_later: Callable[[float, Callable[[], None]], Timer] = _call_later,
    ) -> None:
        self._empty, self._call_later = empty, call_later
        self._timers: dict[Slot, tuple[Timer, float]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def set(self, slot: Slot, seconds: float | None) -> None:
        """Keep the model loaded for `seconds` after each request. If `seconds` is None, keep the model until its memory
        is needed."""
        slot.keep_seconds = seconds
        self.stop(slot)
        self.start(slot)

    def start(self, slot: Slot) -> None:
        """Start the timer, if no request uses the model."""
        if slot.keep_seconds is not None and slot.is_idle:
            seconds = min(slot.keep_seconds, _MOST)
            timer = self._call_later(seconds, lambda: self._expire(slot))
            self._timers[slot] = timer, time.time() + seconds

    def stop(self, slot: Slot) -> None:
        """Stop the timer, because a request uses the model."""
        timer, _ = self._timers.pop(slot, (None, 0.0))
        if timer is not None:
            timer.cancel()

    def expires_at(self, slot: Slot) -> float | None:
        """Return the time of day at which the model is unloaded if no request arrives; None if no time is set."""
        if slot in self._timers:
            return self._timers[slot][1]
        return None if slot.keep_seconds is None or slot.is_pinned else time.time() + slot.keep_seconds

    def _expire(self, slot: Slot) -> None:
        self._timers.pop(slot, None)
        slot.keep_seconds = None
        if slot.is_idle:
            task = asyncio.ensure_future(self._empty(slot))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
