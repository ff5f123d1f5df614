"""LMTP over byte streams, with one message per line, for programs in any language on the same machine.

A child process uses its standard input and output; other processes use a socket pair or a Unix-domain socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from typing import BinaryIO

from bridle.errors import ConnectionLost
from bridle.lmtp.messages import MAX_MESSAGE_BYTES
from bridle.lmtp.server.server import LmtpServer

_CHUNK = 1 << 16


class LineChannel:
    """A channel with one message per line. A line that is too long or not UTF-8 counts as an invalid message, so that
    the client gets an error and may continue."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._rest = bytearray()

    async def send(self, message: str) -> None:
        try:
            self._writer.write(message.encode() + b"\n")
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            raise ConnectionLost(f"the client accepts no more messages: {error or type(error).__name__}") from error

    async def receive(self) -> str:
        while True:
            line = await self._line()
            if line.strip():
                return line.decode("utf-8", "replace")

    async def _line(self) -> bytes:
        begin, is_long = 0, False
        while (end := self._rest.find(b"\n", begin)) < 0:
            if len(self._rest) > MAX_MESSAGE_BYTES:
                is_long = True
                self._rest.clear()
            begin = len(self._rest)
            data = await self._read()
            if not data:  # an incomplete line at the end of the stream is not a message
                raise ConnectionLost("the client has closed the connection")
            self._rest += data
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        return b"a-line-too-long" if is_long or end > MAX_MESSAGE_BYTES else line

    async def _read(self) -> bytes:
        try:
            return await self._reader.read(_CHUNK)
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error}") from error

    async def close(self, reason: str = "") -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def stdio_link(source: BinaryIO | None = None, sink: BinaryIO | None = None) -> LineChannel:
    """Return a channel over this process's standard input and output, to which the process must print nothing else from
    then on."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source or sys.stdin.buffer)
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), sink or sys.stdout.buffer
    )
    return LineChannel(reader, asyncio.StreamWriter(transport, protocol, None, loop))


async def socket_link(sock: socket.socket) -> LineChannel:
    """Return a channel over a connected socket, such as one end of `socket.socketpair()`."""
    return LineChannel(*await asyncio.open_connection(sock=sock))


async def serve_unix(server: LmtpServer, path: str) -> asyncio.Server:
    """Serve every client that connects to a Unix-domain socket, until the returned server is closed."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.serve(LineChannel(reader, writer))

    return await asyncio.start_unix_server(serve, path)
