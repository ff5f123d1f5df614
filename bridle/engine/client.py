"""How front-ends reach an engine, wherever it runs: submit, cancel, events.

`EventStream` carries one request's events from the engine's thread to a reader in another thread or in an asyncio
loop. It is a list that the reader empties: a slow reader gets more events at once, and its queue never holds more
than the request itself can generate and a `Backlog` takes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Protocol

from bridle.engine.backlog import Backlog
from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.request import Request
from bridle.engine.statistics import EngineStatistics
from bridle.errors import BridleError, ControllerError
from bridle.outputs import Event, Finished


class EngineClient(Protocol):
    """An engine as its users see it. All methods are safe from any thread."""

    @property
    def info(self) -> ExecutorInfo: ...

    @property
    def is_healthy(self) -> bool:
        """Whether requests can be served."""
        raise NotImplementedError

    def submit(self, request: Request) -> EventStream:
        """Start a request. Raises `InvalidRequest`, `ContextOverflow`, `Overloaded` or `EngineClosed` at once."""
        raise NotImplementedError

    def cancel(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""

    def statistics(self) -> EngineStatistics:
        """A snapshot of the counters."""
        raise NotImplementedError


class EventStream:
    """Events of one request, for one reader, sync (`for`) or async (`async for`); both give lists of events.

    The iteration ends after the last output's `Finished`. Leaving it early, or leaving a `with` block, cancels the
    request. If the engine goes away, the iteration raises its error.
    """

    def __init__(self, request_id: str, cancel: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._lock = threading.Lock()
        self._backlog = Backlog()
        self._error: BridleError | None = None
        self._complete = False  # the last event is here
        self._drained = False  # and was read
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._async_ready: asyncio.Event | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of the reader, once it reads."""
        return self._loop

    # -- the engine's side -------------------------------------------------------------------------------

    def put(self, events: list[Event]) -> None:
        """Add events, in order; the reader is woken by `wake`. A reader that lets too much wait loses its request."""
        with self._lock:
            if self._error is not None:
                return
            try:
                self._backlog.add(events)
            except ControllerError as error:
                self._backlog.take()
                self._error = error
            else:
                last = events[-1]
                self._complete = isinstance(last, Finished) and last.is_last
        if self._error is not None:
            self._cancel(self.request_id)

    def fail(self, error: BridleError) -> None:
        """No more events will come, because of `error`."""
        with self._lock:
            self._error = error

    def orphan(self, error: BridleError) -> None:
        """This process is a fork of the one whose engine writes here. Nobody else is left to let go of the locks."""
        self._lock, self._ready = threading.Lock(), threading.Event()
        self._backlog, self._error = Backlog(), error

    def wake(self) -> None:
        """Let a reader in another thread see what is there."""
        self._ready.set()

    def wake_in_loop(self) -> None:
        """Let a reader in asyncio see what is there; to be called in its loop."""
        if self._async_ready is not None:
            self._async_ready.set()

    # -- the reader's side -------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Take the request back, unless it is over."""
        if not self._complete:
            self._cancel(self.request_id)

    def take(self) -> list[Event] | None:
        """What arrived since the last read, without waiting; None after the end."""
        with self._lock:
            events = self._backlog.take()
            self._ready.clear()
            if self._async_ready is not None:
                self._async_ready.clear()
            if events:
                return events
            if self._complete:
                self._drained = True
                return None
            if self._error is not None:
                raise self._error
            return []

    def __iter__(self) -> Iterator[list[Event]]:
        try:
            while (events := self.take()) is not None:
                if events:
                    yield events
                else:
                    self._ready.wait()
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        with self._lock:
            self._async_ready = asyncio.Event()
            self._loop = asyncio.get_running_loop()
        try:
            while (events := self.take()) is not None:
                if events:
                    yield events
                else:
                    await self._async_ready.wait()
        finally:
            self.cancel()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def __aenter__(self) -> EventStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
