"""Streams of server-sent events, which end when the client disconnects or stops reading.

The producer is a function that writes events, not a generator, so no cleanup depends on the garbage collector. While a
client's connection is full, the producer waits, and events accumulate in the engine's stream, which merges and limits
them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bridle.errors import BridleError, RequestCancelled
from bridle.http.errors import error_body
from bridle.http.middleware.request_context import RequestContext, call_of, run_while_connected
from bridle.http.settings import HttpSettings
from bridle.outputs import TokenEvent
from bridle.serving.lifecycle.live_text import LiveText

Produce = Callable[["SseWriter"], Awaitable[None]]
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
#: A comment that keeps an idle stream open. Event parsers ignore comments.
COMMENT_PING = b": ping\n\n"
#: The key of a `DirectBody` in the `extensions` of an ASGI scope.
DIRECT_BODY = "bridle.direct_body"


class DirectBody(Protocol):
    """Interface that writes parts of a response body directly to the connection, without the application's middleware,
    once the response has started."""

    def begin(self) -> None:
        """Prepare for a stream, before its response starts."""

    def write(self, data: bytes) -> bool:
        """Write without waiting. Returns whether the connection can accept more data."""

    async def drain(self) -> None:
        """Wait until the connection can accept more data."""


class _Patience:
    """A time limit for many waits, with a single timer. Nearly all waits end at once, and a timer for each wait would
    cost more than the wait. Only one task waits at a time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due = 0.0
        self._waiter: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_over = False

    def begin(self) -> None:
        """Record that the current task begins to wait. If the wait takes too long, the task is cancelled, and `is_over`
        is set."""
        loop = asyncio.get_running_loop()
        self._waiter, self._due = asyncio.current_task(), loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_at(self._due, self._look, loop)

    def end(self) -> None:
        """Record that the wait has ended. If this timer cancelled the task, undo the cancellation."""
        if self.is_over and self._waiter is not None:
            self._waiter.uncancel()
        self._waiter = None

    def close(self) -> None:
        """Cancel the timer after the last wait."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiter is None:
            return  # the next wait sets a timer again
        if loop.time() < self._due:
            self._timer = loop.call_at(self._due, self._look, loop)
            return
        self.is_over = True
        self._waiter.cancel()


class SseWriter:
    """Sends events to one client; one task writes at a time. Call `close` at the end."""

    def __init__(self, send: Send, timeout: float, direct: DirectBody | None = None) -> None:
        self._send = send
        self._direct = direct
        self._timeout = timeout
        self._patience = _Patience(timeout)
        self._lock = asyncio.Lock()
        self.num_writes = 0
        self.rest = b""

    async def send(self, *payloads: Any) -> None:
        """Send JSON events in one write."""
        await self.write(b"".join(map(sse_event, payloads)))

    def end(self, *payloads: Any) -> None:
        """Prepare JSON events and OpenAI's line `[DONE]`, which are sent together with the end of the body."""
        self.rest = b"".join((*map(sse_event, payloads), b"data: [DONE]\n\n"))

    async def write(self, data: bytes) -> None:
        """Write bytes. Raises `RequestCancelled` if the client does not read for too long."""
        if data:
            await self._patiently(self._send, {"type": "http.response.body", "body": data, "more_body": True})

    def live(self, encode: Callable[[list[TokenEvent]], bytes]) -> LiveText | None:
        """Return an object that writes tokens directly to the connection, encoded by `encode`; None if the server
        cannot write directly."""
        direct = self._direct
        if direct is None:
            return None

        def send(tokens: list[TokenEvent]) -> bool:
            data = encode(tokens)
            if not data:
                return True
            self.num_writes += 1
            return direct.write(data)

        return LiveText(send, lambda: self._patiently(direct.drain))

    async def _patiently(self, step: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        async with self._lock:
            self.num_writes += 1
            self._patience.begin()
            try:
                await step(*arguments)
            except asyncio.CancelledError:
                if not self._patience.is_over:
                    raise
                message = f"the client did not read for {self._timeout:g} seconds"
                raise RequestCancelled(message) from None
            finally:
                self._patience.end()

    def close(self) -> None:
        """Stop the writer's timer. Nothing may be sent after this call."""
        self._patience.close()


class SseResponse(Response):
    """Runs `produce` with a writer. An error in `produce` is sent as the last event, because the status was already
    sent."""

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Produce,
        settings: HttpSettings,
        shape: Callable[[BridleError], Any] = error_body,
        ping: bytes = COMMENT_PING,
    ) -> None:
        """Create a response. `shape` formats the body of an error. `ping` is sent while the stream is idle."""
        super().__init__(None, 200, _HEADERS, self.media_type)
        del self.headers["content-length"]
        self._produce = produce
        self._settings = settings
        self._shape = shape
        self._ping = ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = (scope.get("extensions") or {}).get(DIRECT_BODY)
        if direct is not None:
            direct.begin()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with contextlib.closing(SseWriter(send, self._settings.send_timeout, direct)) as writer:
            if await self._tell(writer, call_of(scope), receive):
                await send({"type": "http.response.body", "body": writer.rest, "more_body": False})

    async def _tell(self, writer: SseWriter, call: RequestContext, receive: Receive) -> bool:
        """Send all of the response except the end of its body. Returns False if the client has disconnected."""
        try:
            await run_while_connected(receive, self._run(writer))
        except RequestCancelled as error:
            call.error, call.status = error, 499
            return False
        except BridleError as error:
            call.error = error
            await writer.send(self._shape(error))
        return True

    async def _run(self, writer: SseWriter) -> None:
        """Run `produce`, and send pings meanwhile. A ping that cannot be sent shows that the client has disconnected,
        even while there is no other event to send."""
        try:
            async with asyncio.TaskGroup() as group:
                ping = group.create_task(_send_pings(writer, self._ping, self._settings.ping_interval))
                await self._produce(writer)
                ping.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None


def sse_event(payload: Any) -> bytes:
    """Encode a JSON event."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


async def _send_pings(writer: SseWriter, ping: bytes, interval: float) -> None:
    """Send `ping` regularly while no event is sent, so that clients and proxies keep the connection open."""
    while True:
        before = writer.num_writes
        await asyncio.sleep(interval)
        if writer.num_writes == before:
            await writer.write(ping)
