"""Communication between two processes of the runtime: a ring in shared memory for steps, and framed messages on a
socket.

A ring message is written directly into the ring. One byte on a socket announces the message. The byte also orders the
memory accesses. If the peer dies, the socket reports end of file. The memory is anonymous, so it disappears after a
crash.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

from bridle.errors import ProtocolError

_HEADER = 64
_LENGTH = struct.Struct("<I")
_WRAP = 0xFFFFFFFF
#: Bytes of each direction. Pages that are never used cost nothing.
RING_SIZE = 16 << 20
_MAX_FRAME = 256 << 20
_FULL_TIMEOUT = 30.0


class PeerGone(ProtocolError):
    """The other process has ended."""


def make_memory() -> int:
    """Return a file descriptor of anonymous memory for both directions."""
    descriptor = os.memfd_create("bridle-ring", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 2 * RING_SIZE)
    return descriptor


class Ring:
    """One direction of the ring memory. Exactly one process writes, and exactly one reads."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._view = memoryview(memory)[offset + _HEADER : offset + RING_SIZE]
        self._consumed = ctypes.c_uint64.from_buffer(memory, offset)
        self._capacity = len(self._view)
        self._position = 0

    @property
    def max_message(self) -> int:
        """Return the maximum message size in bytes: half of the ring, so that a message fits into an empty ring at any
        position."""
        return self._capacity // 2 - 16

    def write(self, message: bytes | bytearray) -> None:
        """Store a message. Waits while the ring is full."""
        if len(message) > self.max_message:
            raise ProtocolError(
                f"the message has {len(message)} bytes; a message in this ring buffer has at most {self.max_message}"
            )
        need = _LENGTH.size + len(message)
        start = self._position % self._capacity
        skip = self._capacity - start if start + need > self._capacity else 0
        self._wait_for_room(skip + need)
        if skip:
            if skip >= _LENGTH.size:
                _LENGTH.pack_into(self._view, start, _WRAP)
            start = 0
        _LENGTH.pack_into(self._view, start, len(message))
        self._view[start + _LENGTH.size : start + need] = message
        self._position += skip + need

    def peek(self) -> memoryview:
        """Return the next message without copying it. The message stays valid until `advance`."""
        start = self._position % self._capacity
        left = self._capacity - start
        if left < _LENGTH.size or _LENGTH.unpack_from(self._view, start)[0] == _WRAP:
            self._position += left
            start = 0
        (length,) = _LENGTH.unpack_from(self._view, start)
        if length > self.max_message:
            raise ProtocolError(f"a message in the ring buffer has {length} bytes; at most {self.max_message}")
        self._pending = _LENGTH.size + length
        return self._view[start + _LENGTH.size : start + _LENGTH.size + length]

    def advance(self) -> None:
        """Free the message that `peek` returned."""
        self._position += self._pending
        self._consumed.value = self._position

    def _wait_for_room(self, need: int) -> None:
        end = time.monotonic() + _FULL_TIMEOUT
        pause = 0.0001
        while self._position + need - self._consumed.value > self._capacity:
            if time.monotonic() > end:
                raise PeerGone(f"the other process did not read its ring buffer for {_FULL_TIMEOUT} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.01)


class Port:
    """One side of the connection: a ring for each direction, and the socket that announces messages. `send` may be
    called by several threads."""

    def __init__(self, memory: int, bell: socket.socket, *, is_worker: bool) -> None:
        mapped = mmap.mmap(memory, 2 * RING_SIZE)
        rings = (Ring(mapped, 0), Ring(mapped, RING_SIZE))
        self._incoming, self._outgoing = rings if is_worker else rings[::-1]
        self.bell = bell
        self._lock = threading.Lock()

    @property
    def max_message(self) -> int:
        return self._outgoing.max_message

    def send(self, message: bytes | bytearray) -> None:
        """Store a message and announce it on the socket. Raises `PeerGone`."""
        with self._lock:
            self._outgoing.write(message)
            try:
                self.bell.send(b"\0")
            except OSError as error:
                raise PeerGone(f"the worker has ended: {error}") from None

    def receive(self) -> Iterator[memoryview]:
        """Yield the messages that were announced, each valid until the next is requested. Call this when `bell` is
        readable. Raises `PeerGone` at the end of file."""
        try:
            rung = self.bell.recv(64)
        except OSError as error:
            raise PeerGone(f"the worker has ended: {error}") from None
        if not rung:
            raise PeerGone("worker is gone")
        for _ in rung:
            yield self._incoming.peek()
            self._incoming.advance()


# -- framed messages ---------------------------------------------------------------------------------------


def send_frame(sock: socket.socket, message: bytes, descriptors: list[int] | None = None) -> None:
    """Send a whole message, with open file descriptors if given, over a stream socket. Raises `PeerGone`."""
    header = _LENGTH.pack(len(message))
    try:
        if descriptors:
            socket.send_fds(sock, [header], descriptors)
            sock.sendall(message)
        else:
            sock.sendall(header + message)
    except OSError as error:
        raise PeerGone(f"peer is gone: {error}") from None


def receive_frame(sock: socket.socket, max_descriptors: int = 0) -> tuple[bytearray, list[int]]:
    """Return the next message and the file descriptors that came with it. Raises `PeerGone`."""
    try:
        header, descriptors, _, _ = socket.recv_fds(sock, _LENGTH.size, max_descriptors or 1)
    except OSError as error:
        raise PeerGone(f"peer is gone: {error}") from None
    header = bytes(header)
    if len(header) < _LENGTH.size:
        header += bytes(_receive(sock, _LENGTH.size - len(header)))
    (length,) = _LENGTH.unpack(header)
    if length > _MAX_FRAME:
        raise ProtocolError(f"a frame has {length} bytes; at most {_MAX_FRAME}")
    return _receive(sock, length), list(descriptors)


def _receive(sock: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        try:
            count = sock.recv_into(view)
        except OSError as error:
            raise PeerGone(f"peer is gone: {error}") from None
        if not count:
            raise PeerGone("peer is gone")
        view = view[count:]
    return data
