"""Opens the kernel's files about this process's memory, before the sandbox makes them inaccessible.

A worker forked from another worker must not read its parent's memory through these files. The sandbox does not let the
forked worker open its own memory files, so it cannot read any memory through such files.
"""

from __future__ import annotations

import os
from typing import NamedTuple

_CHUNK = 1 << 16


class OwnMemory(NamedTuple):
    """File descriptors of `/proc/self/mem` and `/proc/self/maps`, and the id of the process that opened them."""

    memory: int
    maps: int
    pid: int

    def mappings(self) -> list[str]:
        """Return the lines of the process's memory map."""
        parts, position = [], 0
        while part := os.pread(self.maps, _CHUNK, position):
            parts.append(part)
            position += len(part)
        return b"".join(parts).decode(errors="replace").splitlines()


_views: list[OwnMemory] = []


def own_memory() -> OwnMemory:
    """Return the memory files of this process, opened if necessary. Raises `OSError` if the files cannot be opened."""
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
