"""Tool calls on a Ray cluster: controllers run in engines, and their tool calls run in the front that has the request.

An engine puts a tool call into the stream of the request whose controller makes the call. The front sends the answer to
the engine's address. A front keeps the answers while the request runs, so that no call is made twice if the engine is
lost. The module does not use Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

from bridle.controller_tools import ToolExecutor
from bridle.distributed.remote_tools import RemoteToolExecutor
from bridle.distributed.replica_tools import ReplicaCalls
from bridle.distributed.tool_messages import ToolAnswered, ToolAsked, ToolGivenUp, ToolMessage
from bridle.engine.client import EventStream
from bridle.engine.request import Request
from bridle.errors import ControllerError
from bridle.outputs import Event

_log = logging.getLogger(__name__)

_GONE = "the front is gone"
#: The maximum number of attempts to send an answer to an engine, and the seconds between two attempts.
_MAX_SENDINGS, _PAUSE_SECONDS = 20, 0.25

#: Sends an answer to the engine with an address.
SendAnswer = Callable[[str, ToolAnswered], Awaitable[None]]


class EngineCalls:
    """The engine's side: puts tool calls into the streams of requests. `address` is the engine's address, to which
    fronts send answers. Use the object in one event loop; calls may come from any thread."""

    def __init__(self, desk: RemoteToolExecutor, address: str) -> None:
        self._desk, self._address = desk, address
        self._lock = threading.Lock()
        self.streams: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[ToolMessage]]] = {}
        self.askers: dict[int, str] = {}  # request ids, by the numbers of their calls
        desk.connect(self._tell)

    def answer(self, message: ToolAnswered) -> None:
        """End a tool call with the answer of a front."""
        with self._lock:
            self.askers.pop(message.number, None)
        self._desk.handle(message)

    async def merged(self, stream: EventStream) -> AsyncGenerator[list[Event] | ToolMessage, None]:
        """Yield a request's events and, between the events, its tool calls. Leaving the iteration cancels the
        request."""
        with self._open(stream.request_id) as calls:
            events = aiter(stream)
            reading, calling = asyncio.ensure_future(anext(events, None)), asyncio.ensure_future(calls.get())
            try:
                while True:
                    await asyncio.wait({reading, calling}, return_when=asyncio.FIRST_COMPLETED)
                    if calling.done():
                        yield calling.result()
                        calling = asyncio.ensure_future(calls.get())
                    elif (news := reading.result()) is None:
                        return
                    else:
                        yield news
                        reading = asyncio.ensure_future(anext(events, None))
            finally:
                reading.cancel()
                calling.cancel()
                stream.cancel()

    @contextlib.contextmanager
    def _open(self, request_id: str) -> Iterator[asyncio.Queue[ToolMessage]]:
        """Open a queue for a request's outgoing calls, and remove the queue at the end of the block."""
        calls: asyncio.Queue[ToolMessage] = asyncio.Queue()
        with self._lock:
            self.streams[request_id] = asyncio.get_running_loop(), calls
        try:
            yield calls
        finally:
            with self._lock:
                del self.streams[request_id]
                self.askers = {number: asker for number, asker in self.askers.items() if asker != request_id}

    def _tell(self, message: ToolMessage) -> None:
        """Put a message into the stream of its request. If the stream has ended, the call ends with an error."""
        assert isinstance(message, (ToolAsked, ToolGivenUp))
        message.replica = self._address
        with self._lock:
            if isinstance(message, ToolAsked):  # parts of a composition have the request's id with a suffix
                names = message.request_id, message.request_id.rpartition("/")[0]
                asker = next((name for name in names if name in self.streams), "")
                self.askers[message.number] = asker
            else:
                asker = self.askers.pop(message.number, "")
            loop, calls = self.streams.get(asker, (None, None))
        if loop is not None and calls is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(calls.put_nowait, message)
        elif isinstance(message, ToolAsked):
            self.answer(ToolAnswered(message.number, "", _GONE))


class FrontCalls:
    """The front's side: makes calls with the front's tools, and sends the answers to engines. Use the object in one
    event loop."""

    def __init__(self, desk: ToolExecutor, send: SendAnswer) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._lock = threading.RLock()
        self.calls: ReplicaCalls[str] = ReplicaCalls(desk, self._begin_sending, self._lock)
        self._sending: set[asyncio.Task[None]] = set()

    def handle(self, request: Request, message: ToolAsked | ToolGivenUp) -> None:
        """Handle a controller's tool call, or its cancellation."""
        with self._lock:
            if isinstance(message, ToolAsked):
                self.calls.ask(message.replica, request, message)
            else:
                self.calls.give_up(message.replica, message)

    def begin_again(self, request_id: str) -> ControllerError | None:
        """Prepare a request to run again. Returns an error if the request would repeat its calls."""
        with self._lock:
            return self.calls.begin_again(request_id)

    def forget(self, request_id: str) -> None:
        """Drop the calls of a finished request."""
        with self._lock:
            self.calls.forget(request_id)

    def _begin_sending(self, address: str, message: ToolAnswered) -> None:
        with contextlib.suppress(RuntimeError):  # the front's loop is closed
            self._loop.call_soon_threadsafe(self._start, address, message)

    def _start(self, address: str, message: ToolAnswered) -> None:
        task = self._loop.create_task(self._deliver(address, message))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _deliver(self, address: str, message: ToolAnswered) -> None:
        for _ in range(_MAX_SENDINGS):
            try:
                return await self._send(address, message)
            except Exception as error:  # any error of Ray; if its engine is lost, the request begins again
                _log.warning("the answer to a tool call did not reach engine %s: %s", address, error)
                await asyncio.sleep(_PAUSE_SECONDS)
