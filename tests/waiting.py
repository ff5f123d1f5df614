"""Functions that wait for other threads and processes. Tests wait for conditions, because a machine may be slow; the
time limit only detects a hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

#: Seconds after which what was waited for is not late but missing; less than pytest's own limit for a test.
PATIENCE = 300.0
_PAUSE = 0.005

T = TypeVar("T")


def until(condition: Callable[[], T], what: str = "the condition", seconds: float = PATIENCE) -> T:
    """Wait until `condition()` is true; return its value. Fails with the text `what` and the last value."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not come true within {seconds:g} seconds: {found!r}")
        time.sleep(_PAUSE)
    return found


async def until_async(condition: Callable[[], T], what: str = "the condition", seconds: float = PATIENCE) -> T:
    """Wait until `condition()` is true, without blocking the event loop; return its value. Fails like `until`."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not come true within {seconds:g} seconds: {found!r}")
        await asyncio.sleep(_PAUSE)
    return found
