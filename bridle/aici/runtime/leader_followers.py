"""Threads of a worker. One thread, the leader, does all the work. If a guest takes too long, another thread becomes the
leader.

So work normally stays in one thread, and other guests wait only a few milliseconds for a slow guest. A ticker thread
checks the time; it also drives wasmtime's epoch clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import wasmtime

from bridle.aici.runtime.wasm import Ticker

#: Seconds after which a task's thread loses the lead.
SLICE = 0.003
#: Ticks without work after which the clock sleeps.
_IDLE_TICKS = 25
MAX_THREADS = 24


class WorkItem:
    """A task of a worker. Only the function `run` may take long."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.started = 0.0
        self.is_detached = False


class LeaderFollowers:
    """Runs the tasks that `next_task` returns. Only the leader calls `next_task`, which blocks until there is a
    task."""

    def __init__(self, engine: wasmtime.Engine, next_task: Callable[[], WorkItem | None]) -> None:
        self._next_task = next_task
        self._baton = threading.Lock()
        self._mutex = threading.Lock()
        self._current: WorkItem | None = None
        self._num_threads = 1
        self._num_waiting = 0
        self._num_running = 0  # tasks, detached ones included
        self._idle_ticks = 0
        self.ticker = Ticker(engine, self._on_tick)

    def run(self) -> None:
        """Run tasks as the leader, or wait to become the leader, until `next_task` returns None. Starts the ticker
        thread."""
        self.ticker.start()
        self._work()

    def reset_after_fork(self) -> None:
        """Reset the state in a forked child, where only the calling thread exists. This thread is the leader and
        continues its task."""
        self._baton = threading.Lock()
        self._baton.acquire()
        self._mutex = threading.Lock()
        self._num_threads, self._num_waiting, self._num_running = 1, 0, 0

    def _work(self) -> None:
        while True:
            with self._mutex:
                self._num_waiting += 1
            self._baton.acquire()
            with self._mutex:
                self._num_waiting -= 1
            if not self._lead():
                return

    def _lead(self) -> bool:
        """Run tasks as the leader. Returns True if another thread became the leader, False if there are no more
        tasks."""
        while True:
            task = self._next_task()
            if task is None:
                self._baton.release()
                return False
            task.started = time.monotonic()
            with self._mutex:
                self._num_running += 1
                self._current = task
            self.ticker.awake()
            task.run()
            with self._mutex:
                self._num_running -= 1
                if task.is_detached:
                    return True
                self._current = None

    def _on_tick(self) -> None:
        task = self._current
        if not self._num_running:
            self._idle_ticks += 1
            if self._idle_ticks > _IDLE_TICKS:
                self.ticker.park()
                self._wake_if_running()
            return
        self._idle_ticks = 0
        if task is not None and time.monotonic() - task.started > SLICE:
            self._detach(task)

    def _wake_if_running(self) -> None:
        """Wake the ticker thread again if a task began between its last check and its sleep."""
        if self._num_running:
            self.ticker.awake()

    def _detach(self, task: WorkItem) -> None:
        """Let another thread become the leader. The slow task continues in its present thread."""
        with self._mutex:
            if self._current is not task:
                return
            if not self._num_waiting:
                if self._num_threads >= MAX_THREADS:
                    return
                self._num_threads += 1
                threading.Thread(target=self._work, name="follower", daemon=True).start()
            task.is_detached = True
            self._current = None
        self._baton.release()
