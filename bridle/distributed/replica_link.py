"""The router's connection to one replica. A lost connection is opened again. The link has two threads: one reads, one
writes.

The link reports messages, connections and losses to its owner. The link does not interpret requests.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from bridle.distributed import replica_messages as m
from bridle.distributed.stall_detector import HELD_UP_SECONDS, is_held_up
from bridle.errors import ProtocolError, ShardUnavailable

_log = logging.getLogger(__name__)

#: Seconds of silence after which a replica counts as hung, unless it waits for a busy machine. A replica sends four
#: messages in this time.
SILENCE_SECONDS = 1.0
_PAUSE_SECONDS = 0.05


class LinkOwner(Protocol):
    """Interface for the owner of links. The links' threads call these methods; `number` identifies the link."""

    def note_up(self, number: int, hello: m.Handshake) -> None: ...
    def note_events(self, number: int, message: m.ToRouter) -> None: ...
    def on_disconnect(self, number: int, reason: str) -> None: ...
    def note_absent(self, number: int) -> None: ...


class ReplicaConnection(Protocol):
    """Interface for a connection to one replica. The connection passes the replica's messages to its owner."""

    def start(self) -> None: ...

    def send(self, message: m.ToReplica) -> None:
        """Send without waiting. The message is lost if the replica is lost."""

    def close(self) -> None:
        """Disconnect from the replica. Idempotent."""


class MakeLink(Protocol):
    """Factory of a `ReplicaConnection` for a number, an address and an owner, with callbacks for a loss and for the
    first result."""

    def __call__(
        self,
        number: int,
        path: str,
        owner: LinkOwner,
        on_loss: Callable[[int, str], None],
        on_proven: Callable[[int], None],
        /,
    ) -> ReplicaConnection: ...


class ReplicaLink:
    """The connection to the replica at `path`. `on_loss(pid, reason)` is called when the replica is lost, and may end
    its process."""

    def __init__(
        self,
        number: int,
        path: str,
        owner: LinkOwner,
        on_loss: Callable[[int, str], None] = lambda pid, reason: None,
        on_proven: Callable[[int], None] = lambda pid: None,
    ) -> None:
        self.number = number
        self._path = path
        self._owner = owner
        self._on_loss = on_loss
        self._on_proven = on_proven
        self._closed = threading.Event()
        self._socket: socket.socket | None = None
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"bridle-replica-{number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: m.ToReplica) -> None:
        """Send without waiting. The message is lost if the replica is lost."""
        self._outbox.put(m.frame(message))

    def close(self) -> None:
        """Disconnect from the replica. Idempotent."""
        self._closed.set()
        self._cut()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    # -- the reading thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.settimeout(SILENCE_SECONDS)
                sock.connect(self._path)
            except OSError:
                sock.close()
                self._owner.note_absent(self.number)
                self._closed.wait(_PAUSE_SECONDS)
                continue
            with sock:
                self._converse(sock)
            self._closed.wait(_PAUSE_SECONDS)

    def _converse(self, sock: socket.socket) -> None:
        self._socket, self._outbox = sock, SimpleQueue()
        writer = threading.Thread(target=self._write, args=(sock, self._outbox), name="bridle-replica-out", daemon=True)
        pid, is_proven, reason = 0, False, "it is closed"
        try:
            hello = self._read_hello(sock)
            pid = hello.pid
            writer.start()
            self._owner.note_up(self.number, hello)
            while True:
                message = m.read_by_router(self._read_frame(sock, pid))
                if isinstance(message, m.Handshake):
                    raise ProtocolError("the replica sent a second Handshake")
                self._owner.note_events(self.number, message)
                if isinstance(message, m.Events) and not is_proven:
                    is_proven = True
                    self._on_proven(pid)
        except TimeoutError:
            reason = f"no sign of life for {SILENCE_SECONDS:g} s or more"
        except (OSError, EOFError) as error:
            reason = f"the connection ended: {error or 'closed by the replica'}"
        except (ProtocolError, ShardUnavailable) as error:
            reason = str(error)
        except Exception as error:  # a bug of bridle, or an invalid message: log the error, and connect again
            _log.exception("cannot read a message of replica %d", self.number)
            reason = f"its message was not understood: {error!r}"
        finally:
            self._socket = None
            self._outbox.put(None)
            if writer.is_alive():
                self._cut(sock)
                writer.join()
        if pid and not self._closed.is_set():
            _log.error("the connection to replica %d (pid %d) is lost: %s", self.number, pid, reason)
            self._on_loss(pid, reason)
            self._owner.on_disconnect(self.number, reason)

    def _read_hello(self, sock: socket.socket) -> m.Handshake:
        message = m.read_by_router(self._read_frame(sock))
        if not isinstance(message, m.Handshake) or message.protocol != m.PROTOCOL:
            raise ProtocolError(
                f"the first message of the replica is a {type(message).__name__}; expected a Handshake of protocol "
                f"{m.PROTOCOL}"
            )
        return message

    def _read_frame(self, sock: socket.socket, pid: int = 0) -> bytes:
        (size,) = m.HEADER.unpack(_read(sock, m.HEADER.size, pid))
        if size > m.MAX_FRAME_BYTES:
            raise ProtocolError(f"the replica announced a frame of {size} bytes; at most {m.MAX_FRAME_BYTES}")
        return _read(sock, size, pid)

    def _cut(self, sock: socket.socket | None = None) -> None:
        sock = sock or self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    # -- the writing thread ----------------------------------------------------------------------------------

    def _write(self, sock: socket.socket, outbox: SimpleQueue[bytes | None]) -> None:
        while (data := outbox.get()) is not None:
            try:
                _send(sock, data)
            except OSError:
                self._cut(sock)  # the reading thread notices the closed socket
                return


def _read(sock: socket.socket, size: int, pid: int) -> bytes:
    """Read exactly `size` bytes of process `pid`. Raises `TimeoutError` if no data comes within the socket's time
    limit. The limit is longer while the process waits for a busy machine."""
    data = bytearray(size)
    view, position, until = memoryview(data), 0, time.monotonic() + HELD_UP_SECONDS
    while position < size:
        try:
            count = sock.recv_into(view[position:])
        except TimeoutError:
            if time.monotonic() > until or not is_held_up(pid):
                raise
            continue
        if not count:
            raise EOFError
        position += count
    return bytes(data)


def _send(sock: socket.socket, data: bytes) -> None:
    view, deadline = memoryview(data), time.monotonic() + 10 * SILENCE_SECONDS
    while view:
        try:
            view = view[sock.send(view) :]
        except TimeoutError:
            if time.monotonic() > deadline:
                raise
