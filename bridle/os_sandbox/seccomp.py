"""A filter of system calls: a small program that the kernel runs before each system call of a process.

Listed calls are permitted, some of them only with certain arguments. Calls that only an attacker would make end the
process with SIGSYS. Any unlisted call fails as if the kernel did not have it, so that libraries use older calls
instead.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from bridle.os_sandbox import kernel
from bridle.os_sandbox.syscalls import SystemCalls, system_calls

_LOAD, IF_EQUAL, _IF_AT_LEAST, _IF_ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _PERMIT = 0x80000000, 0x7FFF0000
_ERRNO = 0x00050000
_MODE_FILTER = 2
#: Offsets of number, architecture and arguments (8 bytes each) in the kernel's description of a call.
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
#: First number of another calling convention of x86-64.
_X32 = 0x40000000

_CLONE_THREAD = 0x00010000
#: Flags of `clone` that create namespaces.
_NAMESPACES = 0x7E020080
#: Flags of `open` with which a file may change: write, create, truncate, append.
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | 0o20000000
#: Permitted options of `prctl`: signal at the parent's end, reading whether dumps are allowed, names of threads and
#: memory, no new privileges.
_PRCTL = (1, 3, 15, 16, 0x53564D41, kernel.PR_SET_NO_NEW_PRIVS)
#: Permitted requests of `ioctl`: sizes and modes of descriptors, and whether one is a terminal. Writing to a terminal's
#: input is not permitted.
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)


class Instruction(NamedTuple):
    """One instruction of the filter. `if_true` and `if_false` are numbers of instructions to skip."""

    code: int
    value: int
    if_true: int = 0
    if_false: int = 0


class _RawInstruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _RawProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_RawInstruction)))


@cache
def filter_of_machine(*, may_fork: bool) -> tuple[Instruction, ...]:
    """Return the filter program for this machine's architecture. `system_calls` must have a table for the
    architecture."""
    calls = system_calls()
    assert calls is not None
    return tuple(make_filter(calls, may_fork=may_fork))


def make_filter(calls: SystemCalls, *, may_fork: bool) -> list[Instruction]:
    """Return the filter program. If `may_fork` is false, the process may only start threads."""
    program = [
        Instruction(_LOAD, _ARCHITECTURE),
        Instruction(IF_EQUAL, calls.audit, if_true=1),
        Instruction(_RETURN, _KILL),
        Instruction(_LOAD, _NUMBER),
        Instruction(_IF_AT_LEAST, _X32, if_false=1),
        Instruction(_RETURN, _KILL),
    ]
    permitted = {**calls.permitted, **(calls.forking if may_fork else {})}
    program += _each(permitted, _PERMIT)
    program += _each(calls.fatal, _KILL)
    for name, number in calls.checked.items():
        check = list(_check(name, may_fork=may_fork))
        program += [Instruction(IF_EQUAL, number, if_false=len(check)), *check]
    return [*program, Instruction(_RETURN, _ERRNO | errno.ENOSYS)]


def install(program: Sequence[Instruction]) -> None:
    """Filter the system calls of this thread, and of all threads and processes that it starts. Raises `OSError`."""
    raw = (_RawInstruction * len(program))()
    for place, each in zip(raw, program, strict=True):
        place.code, place.if_true, place.if_false, place.value = each.code, each.if_true, each.if_false, each.value
    wrapped = _RawProgram(len(program), raw)
    kernel.prctl(kernel.PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(wrapped))


def _each(numbers: Mapping[str, int], verdict: int) -> Iterator[Instruction]:
    for number in numbers.values():
        yield Instruction(IF_EQUAL, number, if_false=1)
        yield Instruction(_RETURN, verdict)


def _check(name: str, *, may_fork: bool) -> Iterator[Instruction]:
    """Return the instructions that check the arguments of a system call."""
    if name == "open":
        return _without(1, _CHANGES, errno.EACCES)
    if name == "openat":
        return _without(2, _CHANGES, errno.EACCES)
    if name == "clone":
        return _clone(may_fork=may_fork)
    if name == "prlimit64":
        return _one_of(0, (0,))  # only for this process itself
    return _one_of(0, _PRCTL) if name == "prctl" else _one_of(1, _IOCTL)


def _clone(*, may_fork: bool) -> Iterator[Instruction]:
    if not may_fork:
        yield _argument(0)
        yield Instruction(_IF_ANY, _CLONE_THREAD, if_true=1)
        yield Instruction(_RETURN, _KILL)
    yield from _without(0, _NAMESPACES, errno.EPERM)


def _without(argument: int, flags: int, error: int) -> Iterator[Instruction]:
    yield _argument(argument)
    yield Instruction(_IF_ANY, flags, if_false=1)
    yield Instruction(_RETURN, _ERRNO | error)
    yield Instruction(_RETURN, _PERMIT)


def _one_of(argument: int, values: Iterable[int]) -> Iterator[Instruction]:
    yield _argument(argument)
    for value in values:
        yield Instruction(IF_EQUAL, value, if_false=1)
        yield Instruction(_RETURN, _PERMIT)
    yield Instruction(_RETURN, _ERRNO | errno.EPERM)


def _argument(index: int) -> Instruction:
    """Return the instruction that loads the lower half of an argument. The kernel uses only the lower half of the
    arguments that the filter checks."""
    return Instruction(_LOAD, _ARGUMENTS + 8 * index)
