"""One direction of a message channel: a shared region guarded by two named POSIX semaphores.

The semaphore `-wr` starts at 1 (the buffer may be written), and `-rd` starts at 0 (no message). The region holds a u32
length, then the message. A wait releases the interpreter lock, and regularly checks whether the peer still runs.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable

import posix_ipc

from bridle.aici import shm
from bridle.errors import ProtocolError

_LENGTH = struct.Struct("<I")
#: Seconds of waiting after which the peer is checked.
_LOOK = 0.25


class SemaphoreChannel:
    """A channel in one direction: one side sends messages, the other receives them. Only one thread of a side may use
    the channel at a time."""

    def __init__(self, name: str, size: int, *, create: bool) -> None:
        self.name = name
        if create:
            self.region = shm.create_region(f"{name}-shm", size)
            self._writable = _create_semaphore(f"{name}-wr", 1)
            self._readable = _create_semaphore(f"{name}-rd", 0)
        else:
            self.region = shm.open_region(f"{name}-shm", size)
            self._writable = _open_semaphore(f"{name}-wr")
            self._readable = _open_semaphore(f"{name}-rd")
        self.max_message = size - _LENGTH.size

    def send(self, message: bytes, timeout: float | None = None, alive: Callable[[], bool] | None = None) -> None:
        """Put a message into the buffer once the buffer is free. Raises `ProtocolError` if the message does not fit, if
        the peer has ended, or if it did not read for `timeout` seconds."""
        if len(message) > self.max_message:
            raise ProtocolError(
                f"the message has {len(message)} bytes; a message on this channel has at most {self.max_message}"
            )
        if not _wait(self._writable, timeout, alive):
            raise ProtocolError(f"{self.name}: the receiver did not read the previous message within {timeout} s")
        self.region[_LENGTH.size : _LENGTH.size + len(message)] = message
        _LENGTH.pack_into(self.region, 0, len(message))
        self._readable.release()

    def receive(self, timeout: float | None = None, alive: Callable[[], bool] | None = None) -> bytes | None:
        """Return the next message, or None after `timeout` seconds. Raises `ProtocolError` if the peer has ended."""
        if not _wait(self._readable, timeout, alive):
            return None
        (length,) = _LENGTH.unpack_from(self.region, 0)
        if length > self.max_message:
            raise ProtocolError(
                f"{self.name}: the message length {length} exceeds the limit of {self.max_message} bytes"
            )
        message = self.region[_LENGTH.size : _LENGTH.size + length]
        _LENGTH.pack_into(self.region, 0, 0)
        self._writable.release()
        return message

    def unlink(self) -> None:
        """Remove the names of the shared objects. Both sides can continue with the objects that they have open.
        Idempotent."""
        shm.remove_region(f"{self.name}-shm")
        remove_semaphore(f"{self.name}-wr")
        remove_semaphore(f"{self.name}-rd")

    def close(self) -> None:
        """Close the region and the semaphores. No thread may be waiting in this object."""
        with contextlib.suppress(BufferError):
            self.region.close()
        self._writable.close()
        self._readable.close()


def _wait(semaphore: posix_ipc.Semaphore, timeout: float | None, alive: Callable[[], bool] | None) -> bool:
    """Wait for the semaphore. Returns True if the semaphore was taken, False after `timeout`."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = _LOOK if end is None else min(_LOOK, max(end - time.monotonic(), 0.0))
        try:
            semaphore.acquire(left)
            return True
        except posix_ipc.BusyError:
            pass
        except posix_ipc.SignalError:
            continue
        if alive is not None and not alive():
            raise ProtocolError("the process at the other end of the channel has ended")
        if end is not None and time.monotonic() >= end:
            return False


def _create_semaphore(name: str, value: int) -> posix_ipc.Semaphore:
    remove_semaphore(name)
    return posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o600, initial_value=value)


def _open_semaphore(name: str) -> posix_ipc.Semaphore:
    try:
        return posix_ipc.Semaphore(name)
    except posix_ipc.Error as error:
        raise ProtocolError(
            f"cannot open semaphore {name!r}: {error}; the engine must create it before the runtime starts"
        ) from None


def remove_semaphore(name: str) -> None:
    """Remove the name of a semaphore. Idempotent."""
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_semaphore(name)
