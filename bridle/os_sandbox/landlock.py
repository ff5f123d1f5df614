"""Landlock, a mechanism of the kernel: it refuses all access to files, TCP ports and signals that was not granted.

Files that the process has already opened stay usable.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from bridle.os_sandbox import kernel

_VERSION_FLAG = 1
_BENEATH_PATH = 1
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
#: Number of rights on files in each version of the interface; later versions have as many as the last one here.
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_TCP = 0b11  # bind and connect, since version 4
_SCOPES = 0b11  # abstract sockets and signals to processes outside, since version 6


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


def version() -> int:
    """Return the version of the kernel's Landlock interface; 0 if Landlock is missing or switched off."""
    try:
        return kernel.call(kernel.LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG))
    except OSError:
        return 0


def restrict(readable: Iterable[Path]) -> None:
    """Permit this process to read files at or below `readable`, and no other access to file systems. If the kernel
    supports it, TCP and signals to other processes are forbidden too. Paths in `readable` that do not exist are
    ignored. Raises `OSError`."""
    known = version()
    rights = (1 << _NUM_RIGHTS.get(known, _NUM_RIGHTS[5])) - 1
    ruleset = _Ruleset(rights, _TCP if known >= 4 else 0, _SCOPES if known >= 6 else 0)
    size = 24 if known >= 6 else 16 if known >= 4 else 8
    handle = kernel.call(
        kernel.LANDLOCK_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), ctypes.c_uint32(0)
    )
    try:
        for path in readable:
            _permit_reading(handle, path)
        kernel.call(kernel.LANDLOCK_RESTRICT_SELF, ctypes.c_int(handle), ctypes.c_uint32(0))
    finally:
        os.close(handle)


def _permit_reading(handle: int, path: Path) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    rights = _READ_FILE | _READ_FOLDER if path.is_dir() else _READ_FILE
    try:
        rule = _PathRule(rights, opened)
        kernel.call(
            kernel.LANDLOCK_ADD_RULE,
            ctypes.c_int(handle),
            ctypes.c_int(_BENEATH_PATH),
            ctypes.byref(rule),
            ctypes.c_uint32(0),
        )
    finally:
        os.close(opened)
