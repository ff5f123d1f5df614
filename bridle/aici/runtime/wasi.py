"""The part of WASI preview 1 that controllers get: printing, and a clock if the operator allows it.

Controllers have no files, network, environment or real randomness. The functions for files return "bad file
descriptor".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from bridle.aici.runtime.wasm import GuestFault, HostFunction
from bridle.errors import ControllerTrap

if TYPE_CHECKING:
    from bridle.aici.runtime.instance import Instance

_OK, _BADF, _NOTSUP_CLOCK = 0, 8, 63
_MAX_VECTORS = 1024

#: Functions that always answer BADF, with their parameters.
_STUBS = {
    "environ_get": "ii",
    "path_create_directory": "iii",
    "path_filestat_get": "iiiii",
    "path_link": "iiiiiii",
    "path_open": "iiiiiIIii",
    "path_readlink": "iiiiii",
    "path_remove_directory": "iii",
    "path_rename": "iiiiii",
    "path_unlink_file": "iii",
    "poll_oneoff": "iiii",
    "fd_filestat_set_size": "iI",
    "fd_read": "iiii",
    "fd_readdir": "iiiIi",
    "fd_close": "i",
    "fd_filestat_get": "ii",
    "fd_prestat_get": "ii",
    "fd_prestat_dir_name": "iii",
    "fd_seek": "iIii",
    "path_filestat_set_times": "iiiiIIi",
}


def fd_write(guest: Instance, fd: int, vectors: int, count: int, written: int) -> int:
    """Append the guest's output to its log."""
    if fd not in (1, 2):
        return _BADF
    if count > _MAX_VECTORS:
        raise GuestFault(f"fd_write got {count} buffers; at most {_MAX_VECTORS}")
    total = 0
    keep = guest.surroundings.limits.max_log
    for index in range(count):
        start = guest.memory.read_u32(vectors + 8 * index)
        length = guest.memory.read_u32(vectors + 8 * index + 4)
        if length > keep:  # only the end of the text would be kept
            guest.log.write(guest.memory.read(start + length - keep, keep))
        else:
            guest.log.write(guest.memory.read(start, length))
        total += length
    guest.memory.write_u32(written, total)
    return _OK


def fd_fdstat_get(guest: Instance, fd: int, target: int) -> int:
    if fd > 2:
        return _BADF
    guest.memory.write(target, b"\x02" + bytes(23))
    return _OK


def two_zeros(guest: Instance, first: int, second: int) -> int:
    """Return 0 for the count and for the size of arguments or environment variables, because guests have none."""
    guest.memory.write_u32(first, 0)
    guest.memory.write_u32(second, 0)
    return _OK


def nothing(guest: Instance, *_: int) -> int:
    return _OK


def bad_descriptor(guest: Instance, *_: int) -> int:
    return _BADF


def proc_exit(guest: Instance, code: int) -> None:
    raise ControllerTrap(f"proc_exit: {code - (code >> 31 << 32)}")


def clock_time_get(guest: Instance, clock: int, _precision: int, target: int) -> int:
    """Return the nanoseconds since the instance began, with the configured resolution. Dialect-1 guests have no
    clock."""
    if guest.dialect == 1:
        return _BADF
    if clock != 1:
        return _NOTSUP_CLOCK
    resolution = guest.surroundings.timer_resolution_ns
    now = time.monotonic_ns() - guest.born_ns
    value = now - now % resolution if resolution else 0
    guest.memory.write(target, value.to_bytes(8, "little"))
    return _OK


def _wasi(name: str, params: str, function: Callable[..., int | None], has_result: bool = True) -> HostFunction:
    return HostFunction("wasi_snapshot_preview1", name, params, has_result, function)


FUNCTIONS = (
    _wasi("fd_write", "iiii", fd_write),
    _wasi("fd_fdstat_get", "ii", fd_fdstat_get),
    _wasi("random_get", "ii", nothing),
    _wasi("args_sizes_get", "ii", two_zeros),
    _wasi("environ_sizes_get", "ii", two_zeros),
    _wasi("args_get", "ii", nothing),
    _wasi("sched_yield", "", nothing),
    _wasi("fd_sync", "i", nothing),
    _wasi("proc_exit", "i", proc_exit, has_result=False),
    _wasi("clock_time_get", "iIi", clock_time_get),
    *(_wasi(name, params, bad_descriptor) for name, params in _STUBS.items()),
)
