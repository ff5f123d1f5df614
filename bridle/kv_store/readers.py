"""Threads that read blocks: fast threads, and a slow thread for times when a model computes on the same processors.

The slow thread has low priority and pauses after each block. Low priority alone does not protect the model. All threads
that compute a layer of the model wait for the slowest one. So each millisecond that a reader takes from a computing
thread delays the whole step of the model.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

_log = logging.getLogger(__name__)

_NUM_READERS = 2
_NICENESS = 10
#: Seconds of rest after each second of processor time for reading while other threads compute. The steps of these
#: threads lose more than this second, because the data that is read also displaces theirs from the processor's caches.
PACE = 30.0


class LoadedBlock(NamedTuple):
    """A block to read: its key, its size, and the function that receives its bytes, which are valid only during the
    call."""

    key: bytes
    num_bytes: int
    put: Callable[[memoryview], None]


@dataclass(slots=True)
class Load:
    """Blocks that are being read. When `is_done` is true, the first `num_loaded` blocks of the load have been passed to
    their `put`."""

    blocks: Sequence[LoadedBlock]
    num_readers: int = _NUM_READERS
    pace: float = 0.0  # seconds of rest for each second of processor time
    is_done: bool = False
    num_loaded: int = 0
    failed: int = 1 << 62  # number of the first block that was not found
    numbers: count[int] = field(default_factory=count)


class Readers:
    """Threads that call `read`, which reads a block and returns whether it was found. When all blocks of a load are
    read, one of the threads calls `end`, which sets `is_done`."""

    def __init__(self, read: Callable[[LoadedBlock], bool], end: Callable[[Load], None], pace: float) -> None:
        self._read, self._end, self.pace = read, end, pace
        self._lock, self._is_ended = threading.Lock(), threading.Event()
        self.rest: Callable[[float], object] = self._is_ended.wait  # waits for a number of seconds, or until the end
        self._fast = ThreadPoolExecutor(_NUM_READERS, "bridle-kv-read")
        self._nice = ThreadPoolExecutor(1, "bridle-kv-read-nice", initializer=be_nice)

    def begin(self, blocks: Sequence[LoadedBlock], is_beside: bool) -> Load:
        """Begin to read blocks. `is_beside` says that other threads compute during the reads."""
        if is_beside:  # one reader only, because two would contend for Python's lock with the computing threads
            load = Load(blocks, num_readers=1, pace=self.pace)
            self._nice.submit(self._run, load)
            return load
        load = Load(blocks)
        for _ in range(_NUM_READERS):
            self._fast.submit(self._run, load)
        return load

    def submit(self, function: Callable[[], None]) -> None:
        """Call a function in the slow thread, after the functions that were submitted earlier."""
        self._nice.submit(function)

    def stop(self) -> None:
        """End the threads. Blocks that are not read when the threads end are reported as not found. Idempotent."""
        self._is_ended.set()
        self._fast.shutdown()
        self._nice.shutdown()

    def _run(self, load: Load) -> None:
        try:
            self._read_all(load)
        except Exception:
            _log.exception("KV cache blocks could not be loaded from the store")
            load.failed = 0
        with self._lock:
            load.num_readers -= 1
            is_last = not load.num_readers
        if is_last:
            load.num_loaded = min(len(load.blocks), load.failed)
            self._end(load)

    def _read_all(self, load: Load) -> None:
        for number in load.numbers:
            if number >= min(len(load.blocks), load.failed):
                return
            began = time.thread_time()
            if self._is_ended.is_set() or not self._read(load.blocks[number]):
                with self._lock:
                    load.failed = min(load.failed, number)
            if load.pace:
                self.rest(load.pace * (time.thread_time() - began))


def be_nice() -> None:
    """Lower the priority of this thread, if the system has priorities for single threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
