"""Finds the linear memories of guests in this process. Wasmtime's API does not give access to the memories of a
component's parts.

A linear memory lies between two inaccessible address ranges. The second range covers all remaining 32-bit addresses.
All reads use `/proc/self/mem`, so that a wrong address gives an error and not a crash.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from bridle.aici.runtime.own_memory import OwnMemory
from bridle.errors import ControllerError

_PAGE = 1 << 16
#: Minimum length of the inaccessible range after a linear memory.
_LEAST_GUARD = 1 << 30
#: Maximum size of a guest's memory.
_MAX_SIZE = 1 << 32


class Unreadable(ControllerError):
    """The bytes at this address cannot be read."""


@dataclass(frozen=True, slots=True)
class LinearMemory:
    """A guest's linear memory. `base` is this process's address of the guest's address 0."""

    base: int
    size: int
    descriptor: int

    def read(self, start: int, length: int) -> bytes:
        """Read bytes. Raises `Unreadable` outside of the memory."""
        if not 0 <= start <= start + length <= self.size:
            raise Unreadable(f"{length} bytes at address {start:#x} are outside the memory of {self.size} bytes")
        try:
            data = os.pread(self.descriptor, length, self.base + start)
        except OSError as error:
            raise Unreadable(f"{length} bytes at address {start:#x} cannot be read: {error.strerror}") from None
        if len(data) < length:
            raise Unreadable(f"{length} bytes at address {start:#x} cannot be read")
        return data

    def find(self, what: bytes, chunk: int = 1 << 20) -> int | None:
        """Return the first address at which these bytes are found, a multiple of their length; None if they are not
        found."""
        for start in range(0, self.size, chunk):
            data = self.read(start, min(chunk, self.size - start))
            place = data.find(what)
            while place >= 0:
                if place % len(what) == 0:
                    return start + place
                place = data.find(what, place + 1)
        return None


def memories(own: OwnMemory) -> Iterator[LinearMemory]:
    """Yield the linear memories of the guests in this process."""
    spans = [_span(line) for line in own.mappings()]
    base = end = 0  # of adjacent mappings after an inaccessible one
    for start, stop, is_open in spans:
        if is_open:
            end = stop if start == end else 0
            continue
        size = end - base
        if start == end and stop - start >= _LEAST_GUARD and 0 < size <= _MAX_SIZE and not size % _PAGE:
            yield LinearMemory(base, size, own.memory)
        base = end = stop


def _span(line: str) -> tuple[int, int, bool]:
    """Return begin and end address of a line of the memory map, and whether the range is accessible."""
    place, rights, *_ = line.split()
    start, stop = (int(number, 16) for number in place.split("-"))
    return start, stop, rights.startswith("r")
