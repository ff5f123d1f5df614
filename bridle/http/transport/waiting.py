"""Waits on behalf of a call: no longer than its client stays connected, and not beyond its deadline."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from bridle.http.transport.call import Call
from bridle.http.transport.sse import run_while_connected

T = TypeVar("T")


async def wait_for(call: Call, doing: str, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client leaves or its deadline passes; `doing` says what took so
    long. Raises `RequestCancelled` and `DeadlineExceeded`."""
    async with call.terms.bounded(doing):
        return await run_while_connected(call.receive, work)
