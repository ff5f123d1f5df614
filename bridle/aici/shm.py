"""POSIX shared memory regions: create, open, remove. This module does not interpret the stored data.

The standard library's shared memory class is not used, because its resource tracker removes segments that belong
to other processes.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import posix_ipc

from bridle.errors import ProtocolError


def check_prefix(prefix: str) -> str:
    """Check a prefix for the names of shared objects, which came from a command line. Raises `ProtocolError`."""
    rest = prefix[1:]
    if not prefix.startswith("/") or not rest or "/" in rest or "\0" in rest or len(prefix) > 200:
        raise ProtocolError(f"shared memory prefix {prefix!r} must be '/' and 1 to 199 characters without '/'")
    return prefix


def create_region(name: str, size: int, mode: int = 0o600) -> mmap.mmap:
    """Create a zeroed region of `size` bytes. An old region with this name is removed first."""
    remove_region(name)
    memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=mode, size=size)
    try:
        return mmap.mmap(memory.fd, size)
    except BaseException:
        remove_region(name)
        raise
    finally:
        memory.close_fd()


def open_region(name: str, expected_size: int) -> mmap.mmap:
    """Open an existing region. Raises `ProtocolError` if the region is missing, or smaller than `expected_size`
    bytes."""
    try:
        memory = posix_ipc.SharedMemory(name)
    except posix_ipc.Error as error:
        raise ProtocolError(
            f"cannot open shared memory {name!r}: {error}; the engine must create it before the runtime starts"
        ) from None
    try:
        size = os.fstat(memory.fd).st_size
        if size < expected_size:
            raise ProtocolError(
                f"shared memory {name!r} has {size} bytes; engine and runtime agreed on {expected_size}"
            )
        return mmap.mmap(memory.fd, expected_size)
    finally:
        memory.close_fd()


def remove_region(name: str) -> None:
    """Remove the name of a region. A process that has mapped the region can still use it. Idempotent."""
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(name)
