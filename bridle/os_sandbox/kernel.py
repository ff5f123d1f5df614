"""Makes system calls that Python does not offer, through the C library."""

from __future__ import annotations

import ctypes
import os

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 38, 22
#: Numbers of Landlock's system calls, which are equal on all architectures.
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


def call(number: int, *arguments: object) -> int:
    """Make a system call; `arguments` are values of ctypes. Raises `OSError` with the kernel's reason."""
    ctypes.set_errno(0)
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    return _checked(result, f"system call {number}")


def prctl(option: int, second: int, third: int = 0) -> None:
    """Change an attribute of this process. Raises `OSError`."""
    ctypes.set_errno(0)
    _checked(_libc.prctl(option, second, third, 0, 0), f"prctl {option}")


def unshare(flags: int) -> None:
    """Leave namespaces. Raises `OSError`."""
    ctypes.set_errno(0)
    _checked(_libc.unshare(flags), "unshare")


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
