"""uvicorn's HTTP protocol with bounds that it lacks: on the size of headers and the time they take, on readers that do
not read, and on connections, WebSockets included.

The parser collects headers until they end, however long that takes. Here a head that grows beyond the limit
is answered with 431 and cut, one that does not end with 408. A peer whose receive window stays closed is cut by the
kernel, also when the application has already given up on it and only bytes on their way are left. Requests on
connections beyond the limit are answered like all others that there is no room for; probes of the server's health are
not among them, and connections that were there before do not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bridle.errors import BridleError, InvalidRequest, Overloaded
from bridle.http.errors import Refuse, error_body
from bridle.http.settings import HttpSettings

_PROBES = (b"/health", b"/ping")


def bounded_protocol(
    max_header_bytes: int, max_connections: int, timeouts: HttpSettings, refuse: Refuse
) -> type[asyncio.Protocol]:
    """A protocol class for uvicorn's `http` setting. `refuse` makes the answer to a request on one connection too
    many."""
    crowded = Overloaded(f"the server has its {max_connections} connections already; none is left for this one")

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

    return BoundedProtocol


class _BoundedProtocol(HttpToolsProtocol):
    max_head: int
    head_seconds: float
    stall_ms: int
    max_peers: int
    for_crowds: Any  # an application that refuses
    _num_head_bytes = 0  # received since the last complete head, while one is being received
    _is_in_head = True
    _is_too_many = False
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._is_too_many = len(self.connections) > self.max_peers
        self._expect_head()
        plain = transport.get_extra_info("socket")
        option = getattr(socket, "TCP_USER_TIMEOUT", None)
        if plain is not None and option is not None:
            with contextlib.suppress(OSError):  # not a TCP socket
                plain.setsockopt(socket.IPPROTO_TCP, option, self.stall_ms)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
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
        super().on_headers_complete()

    def handle_websocket_upgrade(self) -> None:
        if self._is_too_many:
            message = f"the server has its {self.max_peers} connections already"
            self._answer("429 Too Many Requests", Overloaded(message), "retry-after: 1")
        else:
            super().handle_websocket_upgrade()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head = True

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        """No head has come to its end; who never said anything is told nothing."""
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
        """Write a whole answer, and no more on this connection."""
        body = msgspec.json.encode(error_body(error))
        self.transport.write(_head(status, len(body), *lines) + body)
        self.transport.close()


def _head(status: str, num_bytes: int, *more: str) -> bytes:
    lines = (
        f"HTTP/1.1 {status}",
        "content-type: application/json",
        f"content-length: {num_bytes}",
        "connection: close",
        *more,
    )
    return "\r\n".join((*lines, "", "")).encode()
