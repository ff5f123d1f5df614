"""The engine on its own thread; other threads put requests into its queue. Readers in an event loop are woken once per
step.

Any thread may submit or cancel a request. In each step, the engine's thread empties the queue, runs the step, and
passes each request's events to its stream. Readers in asyncio are woken by one `call_soon_threadsafe` per loop and
step, however many streams have new events. Readers are woken just before the engine's thread waits for the device.
If readers were woken earlier, they would compete with the engine's thread for the interpreter. This module uses no HTTP
and no wire format.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from queue import Empty, SimpleQueue

from bridle.engine.client import EventStream
from bridle.engine.engine import Engine
from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.request import Request
from bridle.engine.statistics import EngineStatistics
from bridle.errors import BridleError, DeviceLost, EngineClosed, EngineFailed, InvalidRequest, Overloaded
from bridle.outputs import Event, Finished, FinishReason

_log = logging.getLogger(__name__)

#: The time between steps while all sequences wait for controllers, in seconds.
_STALLED_PAUSE = 0.001
#: The longest time between steps, in seconds, while all sequences wait for events outside of the engine. Such an
#: event wakes the engine, so only deadlines need these steps.
_PARKED_PAUSE = 0.05
#: The time between steps while the device cannot be reached, in seconds. Only deadlines can pass then.
_AWAY_PAUSE = 0.05

#: The least time that an idle engine sleeps; in seconds.
_LEAST_PAUSE = 0.01

#: Error message of calls in a fork of this process, where the engine's thread does not run.
FORKED = (
    "this process is a fork of the one that loaded the model, whose engine does not run here; "
    "load the model in this process, or start the process before the model is loaded"
)


class WakeupQueue:
    """A `threading.Event` that a destructor can set safely at any moment, in any thread."""

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        self._rings.put(None)

    def clear(self) -> None:
        """Clear the event. Only the thread that waits for the event may call this method."""
        while not self._rings.empty():
            self._rings.get()

    def wait(self, timeout: float | None = None) -> None:
        with contextlib.suppress(Empty):
            self._rings.get(timeout=timeout)


class AsyncEngine:
    """An `EngineClient` over an engine in this process. Call `start` and `close`, or use the engine in a `with`
    block."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._inbox: list[Request] = []
        self._cancels: deque[EventStream] = deque()
        self._unparks: list[str] = []
        self._streams: dict[str, EventStream] = {}
        self._told: list[EventStream] = []  # streams with new events whose readers were not woken yet
        self._wake = WakeupQueue()
        self._state = "new"  # -> running -> draining -> closed
        self._fault: BridleError | None = None
        self._num_steps, self._is_in_step, self._is_abandoned = 0, False, False
        self._thread = threading.Thread(target=self._run, name="bridle-engine", daemon=True)
        self._is_orphan = False  # True in a fork of the process that made the engine
        engine.watch_device(self.wake)
        engine.on_wait = self._wake_readers
        _engines.add(self)

    # -- for clients, any thread -------------------------------------------------------------------------

    @property
    def info(self) -> ExecutorInfo:
        return self._engine.info

    @property
    def is_healthy(self) -> bool:
        """Return whether the engine accepts requests, its thread is alive, and its device is reachable."""
        return self._state == "running" and self._thread.is_alive() and self._engine.is_up

    @property
    def fault(self) -> BridleError | None:
        """The error that ended the engine; None while the engine runs, and after a regular close."""
        return self._fault

    @property
    def step_under_way(self) -> int | None:
        """The number of the step that is being computed; None between steps."""
        return self._num_steps if self._is_in_step else None

    @property
    def num_live(self) -> int:
        """The number of active requests."""
        return len(self._streams)

    def submit(self, request: Request) -> EventStream:
        """Start a request. Raises the error at once if the request is invalid or the engine is closed."""
        if self._is_orphan:
            raise EngineClosed(FORKED)
        self._engine.check(request)
        stream = EventStream(request.id, self.cancel)
        with self._lock:
            if self._state != "running":
                raise self._fault or EngineClosed(f"the engine takes no requests: it is {self._state}")
            if request.id in self._streams:
                raise InvalidRequest(f"a request with id {request.id!r} is running already; choose another id", "id")
            limit = self._engine.config.max_waiting
            num_waiting = self._engine.num_waiting + len(self._inbox)
            if num_waiting >= limit:
                raise Overloaded(f"{num_waiting} requests wait already; at most {limit} may wait")
            self._streams[request.id] = stream
            self._inbox.append(request)
        self._wake.set()
        return stream

    def cancel(self, request_id: str) -> None:
        """End a request; unknown ids are ignored. Takes no lock: the garbage collector may cancel an unread stream in
        any thread at any moment."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._cancels.append(stream)
            self._wake.set()

    def release_retained_kv(self, request_id: str) -> None:
        """Release the retained KV of a finished request; unknown ids are ignored."""
        with self._lock:
            self._unparks.append(request_id)
        self._wake.set()

    @property
    def is_paused(self) -> bool:
        """Return True if the engine is paused."""
        return self._engine.is_paused

    def pause(self, *, cancels: bool = False) -> None:
        """Pause the engine: it computes no further step. Requests wait and keep their KV. With `cancels`, all current
        requests are cancelled."""
        self._engine.is_paused = True
        for request_id in list(self._streams) if cancels else ():
            self.cancel(request_id)
        self._wake.set()

    def resume(self) -> None:
        """Continue after `pause`. A pause does not change the outputs."""
        self._engine.is_paused = False
        self._wake.set()

    def wake(self) -> None:
        """Let an idle engine take a step, because an event outside of its thread has happened."""
        self._wake.set()

    def statistics(self) -> EngineStatistics:
        """A snapshot of the engine's counters."""
        return self._engine.statistics()

    # -- life --------------------------------------------------------------------------------------------

    def start(self) -> AsyncEngine:
        """Start the engine's thread."""
        with self._lock:
            if self._state == "new":
                self._state = "running"
                self._thread.start()
        return self

    def close(self, drain: float = 0.0) -> None:
        """Accept no new requests, give running requests `drain` seconds to end, then cancel the remaining requests.
        Blocks until the engine's thread has ended. Idempotent."""
        with self._lock:
            started = self._state != "new"
            if self._state in ("new", "running"):
                self._state = "draining"
        if not started:
            self._engine.close()
            self._state = "closed"
            return
        deadline = time.monotonic() + drain
        while self._streams and self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(0.01)
        with self._lock:
            self._state = "closed"
        self._wake.set()
        if not self._is_abandoned:
            self._thread.join()

    def abandon(self, error: BridleError) -> None:
        """Fail all requests with `error`, because the current step does not end. A thread cannot be ended from outside.
        So the engine's thread ends after its step, and then frees its resources. After this call, `close` does not wait
        for the engine's thread."""
        self._is_abandoned, self._fault = True, self._fault or error
        self._fail_streams()
        self._wake.set()

    def orphan(self) -> None:
        """Fail all waiting and later calls, because this process is a fork without the engine's thread."""
        self._is_orphan, self._state = True, "closed"
        self._lock, self._wake = threading.Lock(), WakeupQueue()
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.orphan(EngineClosed(FORKED))

    def __enter__(self) -> AsyncEngine:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- the engine's thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._state != "closed":
                self._cycle()
            self._cancel_all()
        except DeviceLost as error:
            _log.error("the device can no longer compute, and the engine stops: %s", error)
            self._fault = error
        except BaseException as error:  # nothing may end this thread unseen
            _log.exception("the engine thread failed")
            self._fault = EngineFailed(
                "the engine failed; the server's log has more. Try again, or load the model again."
            )
            self._fault.__cause__ = error
        finally:
            self._end()

    def _cycle(self) -> None:
        """Run one step, or sleep until there is work."""
        self._wake.clear()
        self._take_inbox()
        if self._state != "running":
            self._engine.end_parking()
        if not self._engine.has_work:
            self._wake_readers()
            pause = self._engine.rest()
            if not self._inbox and self._state != "closed":
                self._wake.wait(None if pause is None else max(pause, _LEAST_PAUSE))
            return
        if self._engine.is_stalled:
            self._wake_readers()
            self._wake.wait(self._pause())
        self._num_steps += 1
        self._is_in_step = True
        events = self._engine.step()
        self._is_in_step = False
        self._deliver(events)

    def _pause(self) -> float:
        if not self._engine.is_up or self._engine.is_paused:
            return _AWAY_PAUSE
        return _PARKED_PAUSE if self._engine.is_parked else _STALLED_PAUSE

    def _take_inbox(self) -> None:
        """Take the queued cancellations, and then all new requests; later cancellations wait for the next call. So a
        request is always added before it is cancelled."""
        cancels = [self._cancels.popleft() for _ in range(len(self._cancels))]
        with self._lock:
            requests, self._inbox = self._inbox, []
            unparks, self._unparks = self._unparks, []
        for request in requests:
            try:
                self._engine.accept(request)
            except BridleError as error:
                event = Finished(request.id, 0, FinishReason.ERROR, error=error)
                self._deliver([event])
        for stream in cancels:
            if self._streams.get(stream.request_id) is stream:  # else its request is over
                self._engine.cancel(stream.request_id)
        for request_id in unparks:
            self._engine.release_retained_kv(request_id)

    def _deliver(self, events: Iterable[Event]) -> None:
        """Add events to the streams of their requests. The readers of the streams are woken when the engine waits
        next."""
        self._wake_readers()  # the step had nothing to compute, so readers are still asleep
        by_request: dict[str, list[Event]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for request_id, batch in by_request.items():
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            stream.put(batch)
            self._told.append(stream)
            last = batch[-1]
            if isinstance(last, Finished) and last.is_last:
                with self._lock:
                    del self._streams[request_id]  # the id may be used again

    def _wake_readers(self) -> None:
        told, self._told = self._told, []
        wake_all(told)

    def _cancel_all(self) -> None:
        self._take_inbox()
        for request_id in list(self._streams):
            self._engine.cancel(request_id)
        while self._streams:
            self._deliver(self._engine.step())
        self._wake_readers()

    def _end(self) -> None:
        """End every open stream when the engine's thread ends for any reason, so that no reader waits forever."""
        self._fail_streams()
        self._engine.close()

    def _fail_streams(self) -> None:
        with self._lock:
            self._state = "closed"
            streams = list(self._streams.values())
            self._streams.clear()
        for stream in streams:
            stream.fail(self._fault or EngineClosed("the engine was shut down"))
        wake_all([*self._told, *streams])


_engines: weakref.WeakSet[AsyncEngine] = weakref.WeakSet()


def _orphan_all() -> None:
    """Fail the requests of engines that a forked process inherited from its parent process. The engines' threads do not
    run in the forked process, and their locks may never be released."""
    for engine in list(_engines):
        engine.orphan()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_orphan_all)


def wake_all(streams: Iterable[EventStream]) -> None:
    """Wake the readers of streams that have new events. Each event loop is woken once for all of its streams."""
    by_loop: dict[asyncio.AbstractEventLoop, list[EventStream]] = {}
    for stream in streams:
        if stream.loop is None:
            stream.wake()
        else:
            by_loop.setdefault(stream.loop, []).append(stream)
    for loop, told in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the reader's loop is closed, so its stream is not read any more
            loop.call_soon_threadsafe(_notify_all, told)


def _notify_all(streams: Iterable[EventStream]) -> None:
    for stream in streams:
        stream.notify()
