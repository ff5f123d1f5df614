"""Interface between an engine and its front ends: submit, cancel, events. The engine may run in this process or in
another one.

`EventStream` carries the events of one request from the engine's thread to a reader in another thread or in an asyncio
loop. The reader takes all events from a list at once, so a slow reader gets more events each time. The size of the list
is limited by the tokens that the request can generate and by an `EventBuffer`. The limits of a request bound its
tokens, but not the size of its controllers' logs and variables. So waiting logs and variables are merged: the end of
the logs and the last value of each variable are kept.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.request import Request
from bridle.engine.statistics import EngineStatistics
from bridle.errors import BridleError, ControllerError
from bridle.outputs import Event, Finished, Log, PromptEvent, PromptProgress, Stored, TokenEvent

#: Takes new events in the reader's event loop. Returns None to take the next events too, or the list of events,
#: perhaps empty, that it leaves to the reader.
Listener = Callable[[list[Event]], "list[Event] | None"]

#: Logs and variables that wait are merged when they exceed this many bytes. At most half of it may be left after
#: merging.
MAX_NOTE_BYTES = 16 << 20
#: Number of characters kept of one output's log when logs are merged.
MAX_LOG_CHARS = 1 << 18
#: Maximum number of distinct variables that may wait, so that merging stays fast.
MAX_VARIABLES = 4_096
#: The memory of an event in addition to its text or value, in bytes.
_OVERHEAD = 128
_PROMPT = (PromptProgress, PromptEvent)
_CUT = "[...]\n"


class EngineClient(Protocol):
    """The engine's interface for front ends. All methods are safe from any thread."""

    @property
    def info(self) -> ExecutorInfo: ...

    @property
    def is_healthy(self) -> bool:
        """Return whether requests can be served."""

    def submit(self, request: Request) -> EventStream:
        """Start a request. Raises `InvalidRequest`, `ContextOverflow`, `Overloaded` or `EngineClosed` at once."""

    def cancel(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""

    def release_retained_kv(self, request_id: str) -> None:
        """Release the retained KV of a finished request; unknown ids are ignored."""

    def statistics(self) -> EngineStatistics:
        """Return a snapshot of the engine's counters."""


class EventStream:
    """Events of one request, for one reader: sync (`for`) or async (`async for`). Each iteration gives a list of
    events.

    The iteration ends after the last output's `Finished`. Leaving the iteration early, or leaving a `with` block,
    cancels the request. If the engine ends with an error, the iteration raises that error.

    While an async reader waits, the stream's `listener` may take events in the reader's event loop. The event loop then
    need not switch to the reader's task. The next iteration returns the events that the listener did not take. The
    listener is then removed until the reader sets one again.
    """

    def __init__(self, request_id: str, cancel: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._lock = threading.Lock()
        self._backlog = EventBuffer()
        self._error: BridleError | None = None
        self._complete = False  # the last event was added
        self._ready = threading.Event()
        #: Progress of the prompt: None until a part of it is computed, `PromptEvent` once all of it is.
        self.prompt: PromptProgress | PromptEvent | None = None
        #: The reader's event loop, once the reader iterates in one.
        self.loop: asyncio.AbstractEventLoop | None = None
        self.listener: Listener | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._left: list[Event] | None = None  # events that the listener left
        self._fault: Exception | None = None  # error that the listener raised

    def with_progress(self) -> EventStream:
        """Let the stream also yield each `PromptProgress` event from now on. Returns the stream."""
        self._backlog.keeps_progress = True
        return self

    # -- the engine's side -------------------------------------------------------------------------------

    def put(self, events: list[Event]) -> None:
        """Add events in order; a later call of `wake` wakes the reader. The request fails if too many bytes wait for
        the reader."""
        with self._lock:
            if self._error is not None:
                return
            if len(events) == 1 and type(events[0]) is TokenEvent:  # nearly always
                self._backlog.events += events
                return
            for event in events:
                if isinstance(event, _PROMPT):
                    self.prompt = event
            try:
                self._backlog.add(events)
            except ControllerError as error:
                self._backlog.drain()
                self._error = error
            else:
                last = events[-1]
                self._complete = isinstance(last, Finished) and last.is_last
        if self._error is not None:
            self._cancel(self.request_id)

    def fail(self, error: BridleError) -> None:
        """End the stream with `error`; no further events follow."""
        with self._lock:
            self._error = error

    def orphan(self, error: BridleError) -> None:
        """Fail the stream in a forked process, which has no engine. The stream gets new locks, because no thread of the
        forked process can release the old locks."""
        self._lock, self._ready = threading.Lock(), threading.Event()
        self._backlog, self._error = EventBuffer(), error

    def wake(self) -> None:
        """Wake a reader in another thread. For a reader in asyncio, `notify` wakes it in its event loop."""
        self._ready.set()

    # -- the reader's side -------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Cancel the request, unless it has ended."""
        if not self._complete:
            self._cancel(self.request_id)

    def read_nowait(self) -> list[Event] | None:
        """Return the events since the last read, without waiting; None after the end of the stream."""
        with self._lock:
            events = self._backlog.drain()
            if self.loop is None:
                self._ready.clear()
            if events:
                return events
            if self._complete:
                return None
            if self._error is not None:
                raise self._error
            return []

    def __iter__(self) -> Iterator[list[Event]]:
        try:
            while (events := self.read_nowait()) is not None:
                if events:
                    yield events
                else:
                    self._ready.wait()
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        with self._lock:
            self.loop = loop = asyncio.get_running_loop()
        try:
            while (events := self._read()) is not None:
                if events or self._left is not None:
                    self._left = self.listener = None
                    yield events
                    continue
                self._waiter = loop.create_future()
                await self._waiter
                if self._fault is not None:
                    raise self._fault
        finally:
            self.listener = None
            self.cancel()

    def _read(self) -> list[Event] | None:
        """Return the events that the listener left, else the events since the last read; None after the end of the
        stream."""
        return self.read_nowait() if self._left is None else self._left

    def notify(self) -> None:
        """Notify the reader of new events: the listener takes the events, or the reader is woken. Runs in the reader's
        event loop."""
        if self.listener is not None and self._is_heard(self.listener):
            return
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _is_heard(self, listener: Listener) -> bool:
        """Return True if the listener took all new events and waits for more."""
        try:
            events = self.read_nowait()
            if events:
                self._left = listener(events)
            if self._left is None and not self._complete:
                return True
        except BridleError:
            pass  # the reader gets the same error when it reads
        except Exception as error:  # a bug, which must not keep other readers from their events
            self._fault = error
        self.listener = None
        return False

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()

    async def __aenter__(self) -> EventStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.cancel()


@dataclass(slots=True)
class EventBuffer:
    """A list of events with a limit on its bytes. Only one thread at a time may use the buffer."""

    max_bytes: int = MAX_NOTE_BYTES
    #: Whether `PromptProgress` events are kept.
    keeps_progress: bool = False
    events: list[Event] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, events: Iterable[Event]) -> None:
        """Append events. Raises `ControllerError` if too many bytes wait for the reader, even after merging."""
        for event in events:
            if type(event) is TokenEvent:  # nearly all are
                self.events.append(event)
                continue
            if isinstance(event, PromptProgress) and not self.keeps_progress:
                continue
            self.events.append(event)
            if isinstance(event, (Log, Stored)):
                self.num_bytes += _size(event)
        if self.num_bytes > self.max_bytes:
            self._merge()

    def drain(self) -> list[Event]:
        """Return all waiting events, and empty the buffer."""
        events, self.events, self.num_bytes = self.events, [], 0
        return events

    def _merge(self) -> None:
        self.events = _merged(self.events)
        notes = [event for event in self.events if isinstance(event, (Log, Stored))]
        self.num_bytes = sum(map(_size, notes))
        if self.num_bytes > self.max_bytes // 2 or len(notes) > MAX_VARIABLES:
            raise ControllerError(
                f"{len(notes)} logs and variables with {self.num_bytes} bytes wait for a client that does not read; "
                f"at most {MAX_VARIABLES} with {self.max_bytes // 2} bytes"
            )


def _size(event: Log | Stored) -> int:
    content = len(event.text) if isinstance(event, Log) else len(event.name) + len(event.value)
    return content + _OVERHEAD


def _merged(events: list[Event]) -> list[Event]:
    """Return fewer events with the same logs and variables. Each output has one log event, in the place of its first
    log event. Each variable has one event, in the place of its last write. The outputs of a request share variables, so
    the order of writes is kept across outputs."""
    logs: dict[int, list[str]] = {}
    values: dict[str, _Value] = {}
    for event in events:
        if isinstance(event, Log):
            logs.setdefault(event.index, []).append(event.text)
        elif isinstance(event, Stored):
            values[event.name] = _Value.after(values.get(event.name), event)
    merged: list[Event] = []
    for event in events:
        if isinstance(event, Log):
            if (texts := logs.pop(event.index, None)) is not None:
                merged.append(Log(event.request_id, event.index, _tail("".join(texts))))
        elif not isinstance(event, Stored):
            merged.append(event)
        elif (value := values[event.name]).last is event:
            merged.append(replace(event, value=b"".join(value.pieces), is_append=value.is_append))
    return merged


@dataclass(slots=True)
class _Value:
    """The combined result of several writes of a variable."""

    last: Stored
    pieces: list[bytes]
    is_append: bool

    @classmethod
    def after(cls, known: _Value | None, event: Stored) -> _Value:
        """Return the combined write after `event`, which is one more write of the variable. A write replaces the
        variable's earlier value; an append extends the value."""
        if known is None or not event.is_append:
            return cls(event, [event.value], event.is_append)
        known.pieces.append(event.value)
        known.last = event
        return known


def _tail(text: str) -> str:
    return text if len(text) <= MAX_LOG_CHARS else _CUT + text[-MAX_LOG_CHARS:]
