"""Substitutes for the machine's clocks and random numbers in components.

wasmtime's WASI 0.2 gives a guest real time, with which it can observe other guests. WASI 0.2 also gives real random
numbers, so runs are not repeatable. With the substitutes, each reading of a clock is one millisecond later than the
reading before. Random numbers are the same in every run, and different in every fork. An operator can give guests real
time by setting a resolution. A guest cannot sleep; instead, its callback returns a decision to wait.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from wasmtime import component as wc

from bridle.aici.runtime.wasm import GuestFault

#: The time between two readings of a clock, in nanoseconds.
TICK_NS = 1_000_000
#: Start of the wall clock: 2000-01-01, in seconds since 1970.
EPOCH = 946_684_800
_SECOND_NS = 1_000_000_000
_MAX_RANDOM = 64 << 10
#: The patch level of WASI 0.2 that wasmtime 50 defines.
_PATCH = 12


class World:
    """The clock and the random numbers of one instance. If `resolution_ns` is above 0, the clock shows real time at
    that resolution."""

    def __init__(self, resolution_ns: int) -> None:
        self._resolution_ns = resolution_ns
        self._born_ns = time.monotonic_ns()
        self._looks = 0
        self._random = random.Random(0)

    def monotonic_ns(self) -> int:
        """Return the nanoseconds since the instance began."""
        if self._resolution_ns:
            now = time.monotonic_ns() - self._born_ns
            return now - now % self._resolution_ns
        self._looks += 1
        return self._looks * TICK_NS

    @property
    def resolution_ns(self) -> int:
        """Return the resolution of the clock in nanoseconds."""
        return self._resolution_ns or TICK_NS

    def random_bytes(self, count: int) -> bytes:
        """Return the next random bytes. Raises `GuestFault` if `count` is too large."""
        if count > _MAX_RANDOM:
            raise GuestFault(f"the controller asked for {count} random bytes at once; at most {_MAX_RANDOM}")
        return self._random.randbytes(count)

    def random_u64(self) -> int:
        return self._random.getrandbits(64)

    def diverge(self, branch: int) -> None:
        """Change the random numbers, because the instance is now branch `branch` of a fork."""
        self._random.seed(f"{self._random.getrandbits(64)} {branch}")


def shadow_world(linker: wc.Linker, guarded: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Define substitutes for wasmtime's own clock and random functions. `guarded` converts a function with the instance
    as first argument to one for the linker."""
    linker.allow_shadowing = True
    for name, functions in INTERFACES.items():
        with linker.root() as root, root.add_instance(f"wasi:{name}@0.2.{_PATCH}") as instance:
            for function_name, function in functions.items():
                instance.add_func(function_name, guarded(function))
    linker.allow_shadowing = False


def _datetime(nanoseconds: int) -> wc.Record:
    record: Any = wc.Record()
    record.seconds, record.nanoseconds = divmod(nanoseconds, _SECOND_NS)
    return record  # type: ignore[no-any-return]


def _no_sleep(_guest: Any, _time: int) -> None:
    raise GuestFault('a controller cannot sleep. To be called again later, it can answer {"wait": {"ms": ...}}')


_RANDOM: dict[str, Callable[..., Any]] = {
    "bytes": lambda guest, count: guest.world.random_bytes(count),
    "u64": lambda guest: guest.world.random_u64(),
}
INTERFACES: dict[str, dict[str, Callable[..., Any]]] = {
    "clocks/monotonic-clock": {
        "now": lambda guest: guest.world.monotonic_ns(),
        "resolution": lambda guest: guest.world.resolution_ns,
        "subscribe-instant": _no_sleep,
        "subscribe-duration": _no_sleep,
    },
    "clocks/wall-clock": {
        "now": lambda guest: _datetime(EPOCH * _SECOND_NS + guest.world.monotonic_ns()),
        "resolution": lambda guest: _datetime(guest.world.resolution_ns),
    },
    "random/random": {"get-random-bytes": _RANDOM["bytes"], "get-random-u64": _RANDOM["u64"]},
    "random/insecure": {"get-insecure-random-bytes": _RANDOM["bytes"], "get-insecure-random-u64": _RANDOM["u64"]},
    "random/insecure-seed": {"insecure-seed": lambda guest: (guest.world.random_u64(), guest.world.random_u64())},
}
