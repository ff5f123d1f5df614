"""Threads that write blocks to a store and read them back. So no step of an engine waits for the disk.

An offered block is copied at once into a queue of limited size. The block can be loaded from the queue until it is
written. If the queue is full, the block is dropped. Dropping a block is harmless, because the store is only a cache.
Blocks of a device are copied to the host's memory. If there is a disk store whose write rate allows it, blocks are also
copied to disk. The thread that writes has low priority, so that it hardly slows down a model on the same processors.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from bridle.kv_store.host_memory import HostMemory
from bridle.kv_store.readers import PACE, Load, LoadedBlock, Readers, be_nice
from bridle.kv_store.records import Buffer, Snapshot, bytes_of, copy_block
from bridle.kv_store.store import SegmentStore

_log = logging.getLogger(__name__)

#: Maximum number of bytes of blocks that wait to be written.
MAX_QUEUED_BYTES = 128 << 20
#: Bytes per second that are written on average, and bytes that may be written at once after a pause. More would wear
#: out the disk and slow the model down, for prompts most of which never come again.
RATE, BURST_BYTES = 32 << 20, 1 << 30
#: Minimum number of seconds between two searches for blocks that other processes have written.
_REFRESH_EVERY = 1.0


class _Waiting(NamedTuple):
    key: bytes
    tenant: bytes
    num_bytes: int
    block: Buffer | Snapshot


class _Allowance:
    """Limit on written bytes: `RATE` per second on average, and `burst` at once after a pause."""

    def __init__(self, burst: int) -> None:
        self._burst, self._left, self._seen = burst, float(burst), time.monotonic()

    def has(self, num_bytes: int) -> bool:
        now = time.monotonic()
        self._left, self._seen = min(self._left + (now - self._seen) * RATE, self._burst), now
        return num_bytes <= self._left

    def take(self, num_bytes: int) -> bool:
        """Subtract `num_bytes` from the limit, if these bytes may be written now. Returns whether the bytes may be
        written."""
        is_allowed = self.has(num_bytes)
        self._left -= num_bytes * is_allowed
        return is_allowed


class BlockStore:
    """A `SegmentStore` that threads read and write. Blocks of a device are first written to `memory`, which is in the
    host. While other threads compute, blocks are read in a slow thread at the given `pace`: see `Load`. `on_change` is
    called, from any thread, when a load has ended. Only one thread may call the methods."""

    def __init__(
        self,
        store: SegmentStore,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        burst_bytes: int = BURST_BYTES,
        memory: HostMemory | None = None,
        pace: float = PACE,
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.store, self.host = store, memory
        self._max_queued_bytes = max_queued_bytes
        self.disk = _Allowance(burst_bytes)
        self._queue: deque[_Waiting] = deque()
        self._queued: dict[bytes, _Waiting] = {}
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._writing: Future[None] | None = None
        self.readers = Readers(self.read, self._end_load, pace)
        self._memory = threading.local()
        self._refreshed = time.monotonic()
        self.num_written = self.num_dropped = self.num_read = 0
        self.written_bytes = self.read_bytes = 0

    def count_present(self, keys: Sequence[bytes]) -> int:
        """Return the number of keys before the first one that is neither stored nor waiting to be written."""
        if time.monotonic() - self._refreshed >= _REFRESH_EVERY:
            self._refreshed = time.monotonic()
            self.readers.submit(self.store.refresh)
        return next((number for number, key in enumerate(keys) if not self.has(key)), len(keys))

    def has(self, key: bytes) -> bool:
        """Return whether a block is stored or waits to be written."""
        is_kept = key in self._queued or (self.host is not None and key in self.host)
        return is_kept or key in self.store  # in this order, because the writer removes a block from the queue last

    @property
    def is_lasting(self) -> bool:
        """Return whether stored blocks survive this process."""
        return self.store.limit > 0

    # -- writing -----------------------------------------------------------------------------------------

    def offer(self, key: bytes, tenant: bytes, num_bytes: int, copy: Callable[[], Buffer | Snapshot]) -> bool:
        """Copy a block and write it soon, unless it is already stored. Returns False if the block was dropped because
        the queue is full or the write rate is exceeded."""
        if self.has(key):
            return True
        if not self.has_room(num_bytes):
            self.num_dropped += 1
            return False
        if self.host is None:
            self.disk.take(num_bytes)
        waiting = _Waiting(key, tenant, num_bytes, copy())
        with self._changed:
            self._queue.append(waiting)
            self._queued[key] = waiting
            self._queued_bytes += num_bytes
            self._changed.notify_all()
        if self._writing is None:
            self._writing = self._start_writer()
        return True

    def has_room(self, num_bytes: int) -> bool:
        """Return whether a block of this size can be offered to the store now."""
        is_full = self._queued_bytes + num_bytes > self._max_queued_bytes
        return not (self._is_closed or is_full) and (self.host is not None or self.disk.has(num_bytes))

    def _start_writer(self) -> Future[None]:
        from bridle.threads import start_thread

        return start_thread(self._write, "bridle-kv-write")

    def _write(self) -> None:
        be_nice()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return
                waiting = self._queue[0]
            self._keep(waiting)
            with self._changed:
                self._queue.popleft()
                del self._queued[waiting.key]
                self._queued_bytes -= waiting.num_bytes
                self._changed.notify_all()

    def _keep(self, waiting: _Waiting) -> None:
        """Write a block to the disk, and to the host's memory if blocks are kept there."""
        key, tenant, num_bytes, block = waiting
        kept: Buffer | None = None
        try:
            if self.host is not None:
                kept = self.host.put(key, tenant, num_bytes, partial(copy_block, block))
            if self.host is None or (self.is_lasting and self.disk.take(num_bytes)):
                self._append(key, tenant, bytes_of(block, num_bytes) if kept is None else kept)
                return
        except Exception:
            _log.exception("a KV cache block could not be copied for the store")
        self.num_dropped += kept is None

    def _append(self, key: bytes, tenant: bytes, block: Buffer) -> bool:
        try:
            is_written = self.store.append(key, tenant, block)
        except Exception:
            _log.exception("a KV cache block could not be stored")
            is_written = False
        self.num_written += is_written
        self.num_dropped += not is_written
        self.written_bytes += len(block) * is_written
        return is_written

    def write(self, key: bytes, tenant: bytes, block: Buffer) -> bool:
        """Write a block in this thread, after `stop` has ended the thread that writes. Returns whether the block is
        stored."""
        return self._append(key, tenant, block)

    def flush(self, deadline: float) -> bool:
        """Wait until all offered blocks are written, but not longer than `deadline`. Returns whether the bytes may be
        written."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, max(deadline - time.monotonic(), 0.0))

    # -- reading -----------------------------------------------------------------------------------------

    def load(self, blocks: Sequence[LoadedBlock], is_beside: bool = False) -> Load:
        """Begin to read blocks, in threads that pass each block to its `put`. `is_beside` says that other threads
        compute during the reads."""
        return self.readers.begin(blocks, is_beside)

    def _end_load(self, load: Load) -> None:
        with self._changed:
            self.num_read += load.num_loaded
            self.read_bytes += sum(block.num_bytes for block in load.blocks[: load.num_loaded])
            load.is_done = True
        self.on_change()

    def read(self, block: LoadedBlock) -> bool:
        """Read a block in this thread. Returns whether the block was found."""
        if (queued := self._queued.get(block.key)) is not None:
            block.put(memoryview(bytes_of(queued.block, block.num_bytes)))
            return True
        if self.host is not None:
            with self.host.lend(block.key, block.num_bytes) as lent:
                if lent is not None:
                    block.put(lent)
                    return True
        memory = self._memory_of(block.num_bytes)
        if not self.store.read(block.key, memory):
            return False
        block.put(memory)
        return True

    def _memory_of(self, num_bytes: int) -> memoryview:
        memory: bytearray = getattr(self._memory, "bytes", bytearray())
        if len(memory) != num_bytes:
            memory = self._memory.bytes = bytearray(num_bytes)
        return memoryview(memory)

    def counts(self) -> dict[str, int]:
        """Return the counters for an engine's statistics. Safe from any thread."""
        host = self.host
        of_host = (
            {
                "num_host_blocks": len(host),
                "num_host_bytes": host.num_bytes,
                "num_host_reads": host.num_read,
                "num_host_evictions": host.num_evicted,
            }
            if host is not None
            else {}
        )
        return {
            "num_stored_blocks": self.num_written,
            "num_store_drops": self.num_dropped,
            "num_stored_bytes": self.written_bytes,
            "num_restored_bytes": self.read_bytes,
            "num_blocks_in_store": len(self.store),
            **of_host,
        }

    # -- life --------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the threads after all offered blocks are written. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.readers.stop()
        if self._writing is not None:
            self._writing.result()

    def close(self) -> None:
        """End the threads as `stop` does, and close the segment of this process. Idempotent."""
        self.stop()
        self.store.close()
