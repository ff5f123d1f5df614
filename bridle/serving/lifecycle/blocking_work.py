"""Work that blocks, in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from bridle.threads import start_thread

T = TypeVar("T")


def in_thread(function: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run `function` in a new thread, which does not keep the process alive. Cancelling the future leaves the thread
    running and drops its result."""
    return asyncio.wrap_future(start_thread(function, name))
