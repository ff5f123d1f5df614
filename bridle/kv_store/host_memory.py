"""Blocks of a device in the host's memory, a cache level between device and disk. This cache is fast and limited, and
its content is lost when the process ends.

Memory is allocated in large pieces and never freed, because pinning it is slow. The least recently used blocks are
evicted. A block that is being read is neither moved nor evicted.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_log = logging.getLogger(__name__)

#: Maximum number of bytes that are allocated at once.
PIECE_BYTES = 64 << 20
#: Maximum number of blocks in one allocation.
_MAX_COUNT = 4_096


@dataclass(slots=True)
class _Held:
    """A block, the tag of its tenant, and the number of threads that read it now."""

    memory: memoryview
    tenant: bytes
    num_readers: int = 0


class HostMemory:
    """Keeps at most `limit` bytes of blocks. `allocate` returns memory that the device can access directly (pinned
    memory). Only one thread may call `put`; all other methods are safe from any thread."""

    def __init__(self, limit: int, allocate: Callable[[int], memoryview]) -> None:
        self.limit, self._allocate = limit, allocate
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, _Held] = OrderedDict()  # the least recently used first
        self._free: dict[int, list[memoryview]] = {}  # by size
        self.num_bytes = 0
        self.num_evicted = self.num_read = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def put(self, key: bytes, tenant: bytes, num_bytes: int, fill: Callable[[memoryview], None]) -> memoryview | None:
        """Store a block by letting `fill` write it, unless it is already stored. Returns the memory of the block, valid
        until the next call, or None if there is no room."""
        with self._lock:
            if (held := self._held.get(key)) is not None:
                return held.memory
            memory = self._take(num_bytes)
        if memory is None:
            return None
        try:
            fill(memory)
        except BaseException:
            with self._lock:
                self._free[num_bytes].append(memory)
            raise
        with self._lock:
            self._held[key] = _Held(memory, tenant)
        return memory

    def _take(self, num_bytes: int) -> memoryview | None:
        free = self._free.setdefault(num_bytes, [])
        if not free:
            self._grow(num_bytes, free)
        if not free:
            self._evict(num_bytes, free)
        return free.pop() if free else None

    def _grow(self, num_bytes: int, free: list[memoryview]) -> None:
        size = max(num_bytes, 1)  # blocks of a model without attention are empty
        count = min(max(PIECE_BYTES // size, 1), (self.limit - self.num_bytes) // size, _MAX_COUNT)
        if count <= 0:
            return
        try:
            piece = self._allocate(count * size)
        except (MemoryError, RuntimeError) as error:
            _log.warning("kv_host_bytes: only %d bytes could be allocated: %s", self.num_bytes, error)
            self.limit = self.num_bytes
            return
        self.num_bytes += count * size
        free += [piece[at : at + num_bytes] for at in range(0, count * size, size)]

    def _evict(self, num_bytes: int, free: list[memoryview]) -> None:
        """Evict the least recently used block of this size, except blocks that are being read."""
        for key, held in self._held.items():
            if len(held.memory) == num_bytes and not held.num_readers:
                del self._held[key]
                free.append(held.memory)
                self.num_evicted += 1
                return

    @contextmanager
    def lend(self, key: bytes, num_bytes: int) -> Iterator[memoryview | None]:
        """Yield the bytes of a block, which are valid inside the `with` block; None if the block is not stored."""
        with self._lock:
            held = self._held.get(key)
            if held is not None and len(held.memory) == num_bytes:
                held.num_readers += 1
                self._held.move_to_end(key)
            else:
                held = None
        try:
            yield None if held is None else held.memory
        finally:
            if held is not None:
                with self._lock:
                    held.num_readers -= 1
                    self.num_read += 1

    def newest(self) -> Iterator[tuple[bytes, bytes, memoryview]]:
        """Yield the key, the tenant's tag and the bytes of each block, the last used block first. No other method may
        be called while the blocks are read."""
        for key, held in reversed(self._held.items()):
            yield key, held.tenant, held.memory
