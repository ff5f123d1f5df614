"""uvicorn's HTTP protocol with two bounds that it lacks: on the size of headers, and on readers that do not
read.

The parser collects headers until they end, however long that takes. Here a head that grows beyond the limit
is answered with 431 and cut. A peer whose receive window stays closed is cut by the kernel, also when the
application has already given up on it and only bytes on their way are left.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bridle.errors import InvalidRequest
from bridle.http.errors import error_body


def bounded_protocol(max_header_bytes: int, send_timeout: float) -> type[asyncio.Protocol]:
    """A protocol class for uvicorn's `http` setting."""

    class BoundedProtocol(_BoundedProtocol):
        max_head = max_header_bytes
        stall_ms = int(1000 * send_timeout)

    return BoundedProtocol


class _BoundedProtocol(HttpToolsProtocol):
    max_head: int
    stall_ms: int
    _num_head_bytes = 0  # received since the last complete head, while one is being received
    _is_in_head = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        plain = transport.get_extra_info("socket")
        option = getattr(socket, "TCP_USER_TIMEOUT", None)
        if plain is not None and option is not None:
            with contextlib.suppress(OSError):  # not a TCP socket
                plain.setsockopt(socket.IPPROTO_TCP, option, self.stall_ms)

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._num_head_bytes > self.max_head and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head, self._num_head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head = True

    def _refuse(self) -> None:
        error = InvalidRequest(f"the request's headers exceed {self.max_head} bytes")
        body = msgspec.json.encode(error_body(error))
        self.transport.write(_head(len(body)) + body)
        self.transport.close()


def _head(num_bytes: int) -> bytes:
    lines: tuple[Any, ...] = (
        "HTTP/1.1 431 Request Header Fields Too Large",
        "content-type: application/json",
        f"content-length: {num_bytes}",
        "connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode()
