"""uvicorn's HTTP protocol with additional limits: on the size and duration of headers, on clients that do not read, and
on the number of connections.

uvicorn's parser has no limit on headers. Here, headers that are too large are answered with 431, and headers that take
too long with 408. The kernel closes a connection whose client does not read for too long. If a new connection exceeds
the maximum number, its requests are refused as on an overloaded server, except health checks.

A request that is refused early never becomes a task of the application. A small body of a refused request is dropped,
so that the connection can be used again; after a larger body, the connection is closed. Before closing, the server
reads the bytes in transit, because closing with unread bytes would drop the response. After a refusal, the connection
is not read until the scheduler gives its user the next turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from bridle.errors import BridleError, InvalidRequest, Overloaded
from bridle.http.errors import Refuse, error_body
from bridle.http.middleware.request_context import MODEL_ROUTES
from bridle.http.server.early_reject import DoorAnswer, EarlyRejector
from bridle.http.settings import HttpSettings
from bridle.http.sse import DIRECT_BODY
from bridle.http.writers.pool import WriterPool
from bridle.http.writers.transport import WriterTransport
from bridle.serving.tenancy.loop_throttle import LoopThrottle

_PROBES = (b"/health", b"/ping")
_MAX_READ = 1 << 14  # bytes read from one connection before other connections are read
_MAX_PIPELINED = 32  # requests of a connection that wait for an earlier request
MAX_DROPPED = 1 << 18  # bytes of a refused body that are read to keep the connection
LINGER = 2.0  # seconds to read bytes in transit before a connection is closed
_LENGTH, _CODING, _EXPECT = b"content-length", b"transfer-encoding", b"expect"


def bounded_protocol(
    max_header_bytes: int,
    max_connections: int,
    timeouts: HttpSettings,
    refuse: Refuse,
    door: EarlyRejector,
    turns: LoopThrottle,
    writers: WriterPool | None = None,
) -> type[asyncio.Protocol]:
    """Return a protocol class for uvicorn's `http` setting. `refuse` creates the response on a connection beyond the
    maximum number. `door` answers requests that need not reach the application, as often as the scheduler `turns`
    allows. `writers` are processes that write streams."""
    crowded = Overloaded(f"the server has its {max_connections} connections already, which is the maximum")

    async def refuse_all(scope: Scope, receive: Receive, send: Send) -> None:
        response = refuse(scope["path"], crowded, None)
        response.headers["connection"] = "close"
        await response(scope, receive, send)

    class BoundedProtocol(_BoundedProtocol):
        max_head = max_header_bytes
        head_seconds = timeouts.receive_timeout
        stall_ms = int(1000 * timeouts.send_timeout)
        max_peers = max_connections
        for_crowds = staticmethod(refuse_all)
        answers = door
        shares = turns
        pool = writers

    return BoundedProtocol


class _BoundedProtocol(HttpToolsProtocol):
    max_head: int
    head_seconds: float
    stall_ms: int
    max_peers: int
    for_crowds: Any  # an application that refuses
    answers: EarlyRejector
    shares: LoopThrottle
    pool: WriterPool | None
    _is_held = False  # reading waits for the user's turn
    _held_as = ""  # the user whose turn is awaited
    _is_dropping = False  # the request has its answer, and its body is dropped
    _num_to_drop: int | None = None  # bytes that may still come before the connection is aborted
    _num_head_bytes = 0  # bytes of incomplete headers
    _is_in_head = True
    _is_too_many = False
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._is_too_many = len(self.connections) > self.max_peers
        self._expect_head()
        limit_reads(transport)
        plain = transport.get_extra_info("socket")
        option = getattr(socket, "TCP_USER_TIMEOUT", None)
        if plain is not None and option is not None:
            with contextlib.suppress(OSError):  # not a TCP socket
                plain.setsockopt(socket.IPPROTO_TCP, option, self.stall_ms)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.shares.leave(self._held_as, self._let)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._num_to_drop is not None:
            self._num_to_drop -= len(data)
            if self._num_to_drop < 0:
                self.transport.abort()
            return
        if self._is_in_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._num_head_bytes > self.max_head and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head, self._num_head_bytes = False, 0
        self._stop_timer()
        if self._is_too_many:
            self.app = self.config.loaded_app if self.url.startswith(_PROBES) else self.for_crowds
        if len(self.pipeline) >= _MAX_PIPELINED:
            self.transport.abort()
        elif not self._answer_at_door():
            super().on_headers_complete()
            if self.scope["method"] == "POST":
                body: Any = DirectBody(self.cycle, self.hand_over)
                self.scope["extensions"] = {DIRECT_BODY: body}

    def on_body(self, body: bytes) -> None:
        if not self._is_dropping:
            super().on_body(body)

    def handle_websocket_upgrade(self) -> None:
        if self._is_too_many:
            message = f"the server has its {self.max_peers} connections already"
            self._answer("429 Too Many Requests", Overloaded(message), "retry-after: 1")
        else:
            super().handle_websocket_upgrade()

    def on_message_complete(self) -> None:
        if not self._is_dropping:
            super().on_message_complete()
        elif self._num_to_drop is None:
            self._is_dropping = False
            self._stop_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        self._is_in_head = True

    def hand_over(self, running: RequestResponseCycle) -> None:
        """Let a writer process write to this connection from now on, if a writer is available. `running` is the request
        that is being answered; pipelined requests wait behind it."""
        if self.pool is None or isinstance(self.transport, WriterTransport):
            return
        taken = self.pool.take(self.transport, self)
        if taken is not None:
            self.transport = running.transport = self.cycle.transport = taken
            for cycle, _ in self.pipeline:
                cycle.transport = taken

    # -- early answers ---------------------------------------------------------------------------------------

    def _answer_at_door(self) -> bool:
        """Answer the request early if possible. Returns whether the request was answered. Responses keep the order of
        requests, so a pipelined request that waits is not answered early."""
        path = self.url.partition(b"?")[0].decode("latin-1")
        is_next = self.cycle is None or self.cycle.response_complete
        if not is_next or not (path in MODEL_ROUTES or path.startswith(("/health", "/ping"))):
            return False
        began = time.thread_time()
        scope = {**self.scope, "method": self.parser.get_method().decode("ascii"), "path": path, "query_string": b""}
        answer = self.answers.answer(scope)
        if answer is None:
            return False
        self._give(answer)
        self.shares.charge(time.thread_time() - began)
        if answer.user is not None:
            self._wait_for_turn(answer.user)
        return True

    def _give(self, answer: DoorAnswer) -> None:
        stays = self._is_little() and self.parser.should_keep_alive() and not self._is_too_many
        response = answer.response
        status = HTTPStatus(response.status_code)
        lines = [b"HTTP/1.1 %d %s" % (status, status.phrase.encode())]
        lines += [b"%s: %s" % header for header in response.raw_headers]
        lines += [b"", b""] if stays else [b"connection: close", b"", b""]
        self.transport.write(b"\r\n".join(lines) + bytes(response.body))
        self._is_dropping = True
        if stays:
            self._head_timer = self.loop.call_later(self.head_seconds, self.transport.close)
        else:
            self._leave()

    def _is_little(self) -> bool:
        """Return whether the request's headers announce a body that is small enough to be read and dropped."""
        given = {name: value for name, value in self.headers if name in (_LENGTH, _CODING, _EXPECT)}
        return _CODING not in given and _EXPECT not in given and int(given.get(_LENGTH, b"0")) <= MAX_DROPPED

    def _leave(self) -> None:
        """Send nothing more, and close when the peer closes, or after `LINGER` seconds."""
        self._num_to_drop = MAX_DROPPED
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._head_timer = self.loop.call_later(LINGER, self.transport.close)

    def _wait_for_turn(self, user: str) -> None:
        """Pause reading until the scheduler gives this user the next turn."""
        self._is_held, self._held_as = True, user
        self.shares.schedule(user, self._let)
        if self._is_held:
            self.flow.pause_reading()

    def _let(self) -> None:
        self._is_held = False
        if not self.flow.write_paused:  # else reading resumes when the client has read the answers
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        """Stop reading from a client that does not read the responses to refused requests. While the application
        answers a request, reading continues, because only reading detects a disconnect."""
        super().pause_writing()
        if self.cycle is None or self.cycle.response_complete:
            self.flow.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self._is_held:
            self.flow.resume_reading()

    # -- limits ----------------------------------------------------------------------------------------------

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        """Close a connection whose headers did not end in time. A client that sent nothing gets no response."""
        self._head_timer = None
        if not self._num_head_bytes:
            self.transport.close()
        elif not self.transport.is_closing():
            error = InvalidRequest(f"the request's headers did not arrive within {self.head_seconds:g} seconds")
            self._answer("408 Request Timeout", error)

    def _refuse(self) -> None:
        error = InvalidRequest(f"the request's headers exceed {self.max_head} bytes")
        self._answer("431 Request Header Fields Too Large", error)

    def _answer(self, status: str, error: BridleError, *lines: str) -> None:
        """Write a complete response, and close the connection."""
        body = msgspec.json.encode(error_body(error))
        self.transport.write(_head(status, len(body), *lines) + body)
        self.transport.close()


class DirectBody:
    """Writes to the connection of one request, as uvicorn does. Implements `bridle.http.sse.DirectBody`."""

    __slots__ = ("_begin", "_cycle")

    def __init__(self, cycle: RequestResponseCycle, begin: Callable[[RequestResponseCycle], None]) -> None:
        self._cycle, self._begin = cycle, begin

    def begin(self) -> None:
        self._begin(self._cycle)

    def write(self, data: bytes) -> bool:
        cycle = self._cycle
        if cycle.disconnected:
            return True
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if cycle.chunked_encoding else data)
        return not cycle.flow.write_paused

    async def drain(self) -> None:
        if not self._cycle.disconnected:
            await self._cycle.flow.drain()


def limit_reads(transport: asyncio.BaseTransport) -> None:
    """Limit the number of bytes per read. All bytes of a read are handled together, so other connections wait less
    after smaller reads."""
    if hasattr(transport, "max_size"):  # asyncio's own socket transports read a quarter of a megabyte
        transport.max_size = _MAX_READ


def _head(status: str, num_bytes: int, *more: str) -> bytes:
    lines = (
        f"HTTP/1.1 {status}",
        "content-type: application/json",
        f"content-length: {num_bytes}",
        "connection: close",
        *more,
    )
    return "\r\n".join((*lines, "", "")).encode()
