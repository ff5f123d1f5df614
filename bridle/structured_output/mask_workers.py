"""Threads that compute masks while the device computes logits.

Several threads compute in parallel, because llguidance releases the interpreter lock while it computes. Threads start
when the first work is submitted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

Work = Callable[[], None]


class Workers:
    """A pool of at most `num_threads` threads. `submit` never blocks."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._queue: deque[Work] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._closed = False

    def submit(self, work: Iterable[Work]) -> None:
        """Queue work; a pool with one thread does it in this order. The work must catch its own errors."""
        with self._changed:
            self._queue.extend(work)
            waiting = len(self._queue)
            while waiting > self._num_idle and len(self._threads) < self.num_threads and not self._closed:
                self._start()
                waiting -= 1
            self._changed.notify(min(waiting, self._num_idle))

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="bridle-masks", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._num_idle += 1
                while not self._queue and not self._closed:
                    self._changed.wait()
                self._num_idle -= 1
                if self._closed:
                    return
                work = self._queue.popleft()
            work()

    def close(self) -> None:
        """Let each thread end after its current work. Idempotent."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
