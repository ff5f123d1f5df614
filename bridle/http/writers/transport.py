"""A connection that the server reads and a writer process writes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Any

from bridle.http.writers.link import WriterLink


class WriterTransport(asyncio.Transport, asyncio.Protocol):
    """The transport of a connection whose data is sent through `link`. The server's protocol uses this object like any
    transport. For the transport `plain`, which reads, this object is the protocol."""

    def __init__(self, plain: asyncio.Transport, protocol: asyncio.Protocol, link: WriterLink) -> None:
        super().__init__()
        self._plain, self._protocol, self._link = plain, protocol, link
        self._is_closing = self._is_full = self._is_paused = False
        self.number = link.open(self, self.fileno())
        plain.set_protocol(self)

    def fileno(self) -> int:
        """Return the file descriptor of the connection."""
        return int(self._plain.get_extra_info("socket").fileno())

    # -- methods that the server's protocol calls ------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if not self._is_closing:
            self._link.write(self.number, bytes(data))

    def write_eof(self) -> None:
        self._link.end(self.number)

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        """Close the connection once all data is written. The transport reads nothing more."""
        if not self.is_closing():
            with contextlib.suppress(RuntimeError):  # the connection is already being closed
                self._plain.pause_reading()
            self._link.close(self.number)
        self._is_closing = True

    def abort(self) -> None:
        """Close the connection at once."""
        self._link.drop(self.number)
        self.lose()

    def is_closing(self) -> bool:
        return self._is_closing or self._plain.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._plain.get_extra_info(name, default)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def is_reading(self) -> bool:
        return self._plain.is_reading()

    def pause_reading(self) -> None:
        self._plain.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_closing:
            self._plain.resume_reading()

    # -- methods that the reading transport calls --------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if not self._is_closing:
            self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the loss to the writer process. If the client closed its side, queued data is still written."""
        (self._link.close if exc is None else self._link.drop)(self.number)
        self._is_closing = True
        self._protocol.connection_lost(exc)

    # -- methods that the link calls ---------------------------------------------------------------------------

    def fill(self, is_full: bool) -> None:
        self._is_full = is_full
        self.settle()

    def settle(self) -> None:
        """Pause or resume the protocol's writing, depending on the queued data of the client and of the link."""
        is_paused = self._is_full or self._link.is_stalled
        if is_paused != self._is_paused and not self.is_closing():
            self._is_paused = is_paused
            (self._protocol.pause_writing if is_paused else self._protocol.resume_writing)()

    def finish(self) -> None:
        self._is_closing = True
        self._plain.close()

    def lose(self) -> None:
        self._is_closing = True  # closing is not enough: a process that hangs still has a descriptor
        if not self._plain.is_closing():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as sock:
                sock.shutdown(socket.SHUT_RDWR)
        self._plain.abort()
