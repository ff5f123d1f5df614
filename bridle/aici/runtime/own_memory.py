"""The kernel's files about this process's memory, which a worker opens before the sandbox makes them inaccessible.

A worker that was forked from another one must not read its parent's memory through these files, and the sandbox does
not let it open its own. So it cannot read its memory.
"""

from __future__ import annotations

import os
from typing import NamedTuple

_CHUNK = 1 << 16


class OwnMemory(NamedTuple):
    """Descriptors of `/proc/self/mem` and `/proc/self/maps`, and the process that they show."""

    memory: int
    maps: int
    pid: int

    def mappings(self) -> list[str]:
        """Return the lines of the memory map."""
        parts, position = [], 0
        while part := os.pread(self.maps, _CHUNK, position):
            parts.append(part)
            position += len(part)
        return b"".join(parts).decode(errors="replace").splitlines()


_views: list[OwnMemory] = []


def own_memory() -> OwnMemory:
    """Return the files of this process, and open them if necessary. Raises `OSError` if they cannot be opened."""
    while _views:
        if _views[0].pid == os.getpid():
            return _views[0]
        stale = _views.pop()
        os.close(stale.memory)
        os.close(stale.maps)
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        _views.append(OwnMemory(memory, os.open("/proc/self/maps", os.O_RDONLY), os.getpid()))
    except OSError:
        os.close(memory)
        raise
    return _views[0]
