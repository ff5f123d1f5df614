"""One direction of a message channel in shared memory: half of a shared region, which begins with a state word (a
futex).

The state word is 0 (empty), 0xFFFFFFFF (being filled) or the length of the payload that follows it. The writer gets no
signal when the word is 0 again, so the writer polls with growing intervals. The reader sleeps in the kernel. Each word
has one writer and one reader, so aligned stores are enough, without compare-and-swap.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import time
from collections.abc import Callable

from bridle.aici import shm
from bridle.errors import ProtocolError, UnsupportedFeature

_FILLING = 0xFFFFFFFF
_SYSCALL = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_LOOK = 0.25
_MIN_SIZE = 8192


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class FutexChannel:
    """One half of a shared region. `to_runtime` selects the half: commands are in the first half, replies in the second
    half."""

    def __init__(self, name: str, size: int, *, to_runtime: bool, create: bool) -> None:
        if size <= _MIN_SIZE:
            raise ProtocolError(f"the futex channel has {size} bytes; it must have more than {_MIN_SIZE}")
        self.name = name
        self._number = _syscall_number()
        self.region = shm.create_region(name, size) if create else shm.open_region(name, size)
        self._offset = 0 if to_runtime else size // 2
        self._word = ctypes.c_uint32.from_buffer(self.region, self._offset)
        self._address = ctypes.addressof(self._word)
        self.max_message = size // 2 - 16

    def send(self, message: bytes, timeout: float | None = None, alive: Callable[[], bool] | None = None) -> None:
        """Send a message as `SemaphoreChannel.send` does. An empty message raises `ProtocolError`, because length 0
        means an empty channel."""
        if not 0 < len(message) <= self.max_message:
            raise ProtocolError(
                f"the message has {len(message)} bytes; a message on this channel has 1 to {self.max_message}"
            )
        self._wait_until_empty(timeout, alive)
        self._word.value = _FILLING
        start = self._offset + 4
        self.region[start : start + len(message)] = message
        _fence()
        self._word.value = len(message)
        self._futex(_FUTEX_WAKE, 0x7FFFFFFF, None)

    def receive(self, timeout: float | None = None, alive: Callable[[], bool] | None = None) -> bytes | None:
        """Receive a message as `SemaphoreChannel.receive` does. If the thread wakes up without a message, it continues
        to wait."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            length = self._word.value
            if length not in (0, _FILLING):
                return self._take(length)
            left = _LOOK if end is None else min(_LOOK, max(end - time.monotonic(), 0.0))
            self._futex(_FUTEX_WAIT, length, left)
            if self._word.value in (0, _FILLING):
                if alive is not None and not alive():
                    raise ProtocolError("the process at the other end of the channel has ended")
                if end is not None and time.monotonic() >= end:
                    return None

    def unlink(self) -> None:
        """Remove the name of the region. Both sides can continue to use the region. Idempotent."""
        shm.remove_region(self.name)

    def close(self) -> None:
        """Close the region. No thread may be waiting in this object."""
        del self._word
        self.region.close()

    def _take(self, length: int) -> bytes:
        if length > self.max_message:
            raise ProtocolError(
                f"{self.name}: the message length {length} exceeds the limit of {self.max_message} bytes"
            )
        _fence()
        start = self._offset + 4
        message = self.region[start : start + length]
        _fence()
        self._word.value = 0
        return message

    def _wait_until_empty(self, timeout: float | None, alive: Callable[[], bool] | None) -> None:
        begin = time.monotonic()
        pause = 0.00002
        while self._word.value != 0:
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
            if alive is not None and not alive():
                raise ProtocolError("the process at the other end of the channel has ended")
            if timeout is not None and time.monotonic() - begin >= timeout:
                raise ProtocolError(f"{self.name}: the receiver did not read the previous message within {timeout} s")

    def _futex(self, operation: int, value: int, timeout: float | None) -> None:
        spec = None
        if timeout is not None:
            spec = ctypes.byref(_Timespec(int(timeout), int(timeout % 1 * 1e9)))
        result = _libc.syscall(
            ctypes.c_long(self._number),
            ctypes.c_void_p(self._address),
            operation,
            ctypes.c_uint32(value),
            spec,
            None,
            0,
        )
        if result < 0:
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(code, f"futex: {os.strerror(code)}")


_libc = ctypes.CDLL(None, use_errno=True)


def _syscall_number() -> int:
    number = _SYSCALL.get(platform.machine())
    if sys.platform != "linux" or number is None:
        raise UnsupportedFeature(
            f"futex channels need Linux on {' or '.join(_SYSCALL)}; use semaphore channels instead"
        )
    return number


def _make_fence() -> Callable[[], object]:
    """Return a function that orders plain stores to memory. On x86, which orders stores itself, the function does
    nothing; on other machines it calls libatomic's fence."""
    if platform.machine() == "x86_64":
        return lambda: None
    try:
        library = ctypes.CDLL("libatomic.so.1")
    except OSError:
        raise UnsupportedFeature(
            "futex channels need libatomic on this machine; use semaphore channels instead"
        ) from None
    return lambda: library.atomic_thread_fence(5)


_cached_fence: Callable[[], object] | None = None


def _fence() -> None:
    global _cached_fence
    if _cached_fence is None:
        _cached_fence = _make_fence()
    _cached_fence()
