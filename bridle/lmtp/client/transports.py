"""Transports of a client. A transport carries whole messages, in order, in both directions.

A `Transport` can connect more than once, because a client reconnects. A `ClientChannel` is one connection; it raises
`ConnectionLost` when the connection is lost for any reason. This module does not interpret messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, Self

from bridle.errors import ConnectionLost, ProtocolError
from bridle.lmtp.messages import MAX_MESSAGE_BYTES

_GRACE_SECONDS = 5.0


class ClientChannel(Protocol):
    """Interface of one connection. One task may send while another task receives."""

    async def send(self, message: str) -> None:
        """Send a message to the peer. Waits while the peer accepts no message."""

    async def receive(self) -> str:
        """Receive and return the next message. Safe to cancel: no message is lost."""

    async def close(self) -> None:
        """Close the connection. Idempotent."""


class Transport(Protocol):
    """Interface of a way to connect to a server."""

    @property
    def name(self) -> str:
        """Return the name of the server, for error messages."""

    async def connect(self) -> ClientChannel:
        """Open a new connection. Raises `ConnectionLost`."""


class LineTransport:
    """A channel with one message per line, over a pair of asyncio streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        self._reader = reader
        self._writer = writer
        self.name = name

    async def send(self, message: str) -> None:
        if "\n" in message:
            raise ProtocolError(
                "the message has a line break; on standard input and output each message must be one line"
            )
        try:
            self._writer.write(message.encode() + b"\n")
            await self._writer.drain()
        except (OSError, RuntimeError) as error:  # asyncio raises RuntimeError once the transport is closed
            raise ConnectionLost(f"{self.name} accepts no more messages: {error or type(error).__name__}") from error

    async def receive(self) -> str:
        try:
            line = await self._reader.readline()
        except ValueError as error:
            raise ConnectionLost(
                f"{self.name} sent a line of more than {MAX_MESSAGE_BYTES} bytes, the limit"
            ) from error
        except OSError as error:
            raise ConnectionLost(f"the connection to {self.name} broke: {error}") from error
        if not line.endswith(b"\n"):  # an incomplete line at the end of the stream is not a message
            raise ConnectionLost(f"{self.name} closed the connection")
        return line.decode("utf-8", errors="replace")

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class StdioCarrier:
    """Transport to a server that is started as a child process, with one message per line on standard input and output.
    Each connection starts a process. Closing the connection closes the process's standard input; if the process does
    not end, it is killed."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
        self._command = list(command)
        self.name = self._command[0]
        self._env = None if env is None else {**os.environ, **env}

    async def connect(self) -> ClientChannel:
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, env=self._env, limit=MAX_MESSAGE_BYTES
            )
        except OSError as error:
            raise ConnectionLost(f"{self.name!r} cannot be started: {error}") from error
        return _ProcessLink(process, self.name)


class _ProcessLink(LineTransport):
    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        assert process.stdin is not None and process.stdout is not None
        super().__init__(process.stdout, process.stdin, name)
        self._process = process

    async def close(self) -> None:
        await super().close()
        for end in (self._process.terminate, self._process.kill):
            try:
                await asyncio.wait_for(self._process.wait(), _GRACE_SECONDS)
                return
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    end()
        await self._process.wait()


class SocketCarrier:
    """Transport over a connected socket, with one message per line. `open_socket` returns the socket, such as one end
    of `socket.socketpair()` or a Unix-domain socket. Pickled objects of the original transport are not supported."""

    def __init__(self, open_socket: Callable[[], socket.socket], name: str = "the other process") -> None:
        self._open_socket = open_socket
        self.name = name

    @classmethod
    def unix(cls, path: str) -> Self:
        """Return a transport to a server that listens on a Unix-domain socket."""

        def connect() -> socket.socket:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(path)
            except OSError:
                sock.close()
                raise
            return sock

        return cls(connect, path)

    async def connect(self) -> ClientChannel:
        try:
            sock = await asyncio.to_thread(self._open_socket)
            reader, writer = await asyncio.open_connection(sock=sock, limit=MAX_MESSAGE_BYTES)
        except OSError as error:
            raise ConnectionLost(f"{self.name} cannot be reached: {error}") from error
        return LineTransport(reader, writer, self.name)


class MemoryLink:
    """One end of a pair of bounded queues in this process, created by `memory_pair`."""

    def __init__(
        self, incoming: asyncio.Queue[str | None], outgoing: asyncio.Queue[str | None], max_messages: int
    ) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._max_messages = max_messages
        self._closed = False
        self._room = asyncio.Event()
        self.peer: MemoryLink = self

    async def send(self, message: str) -> None:
        while self._outgoing.qsize() >= self._max_messages and not self._is_cut():
            self._room.clear()
            await self._room.wait()
        if self._is_cut():
            raise ConnectionLost("the connection is closed")
        self._outgoing.put_nowait(message)

    def _is_cut(self) -> bool:
        return self._closed or self.peer._closed

    async def receive(self) -> str:
        """Receive the next message. Messages that the other end sent before it closed still arrive."""
        message = None if self._closed else await self._incoming.get()
        if message is None:
            self._closed = True
            raise ConnectionLost("the connection is closed")
        self.peer._room.set()
        return message

    async def close(self, reason: str = "") -> None:
        if not self._closed:
            self._closed = True
            for queue in (self._incoming, self._outgoing):
                queue.put_nowait(None)
            self._room.set()
            self.peer._room.set()


def memory_pair(max_messages: int = 64) -> tuple[MemoryLink, MemoryLink]:
    """Return two connected ends. A sender waits while the other end has `max_messages` unread messages."""
    left: asyncio.Queue[str | None] = asyncio.Queue()
    right: asyncio.Queue[str | None] = asyncio.Queue()
    one, other = MemoryLink(left, right, max_messages), MemoryLink(right, left, max_messages)
    one.peer, other.peer = other, one
    return one, other


class MemoryCarrier:
    """Transport to a server in this process. For each connection, a task runs `serve` on the other end of the
    channel."""

    name = "the server in this process"

    def __init__(self, serve: Callable[[ClientChannel], Awaitable[None]], max_messages: int = 64) -> None:
        self._serve = serve
        self._max_messages = max_messages
        self._tasks: set[asyncio.Task[None]] = set()

    async def connect(self) -> ClientChannel:
        ours, theirs = memory_pair(self._max_messages)
        task = asyncio.get_running_loop().create_task(self._run(theirs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return ours

    async def _run(self, link: ClientChannel) -> None:
        try:
            await self._serve(link)
        except ConnectionLost:
            pass  # the client has closed the channel
        finally:
            await link.close()
