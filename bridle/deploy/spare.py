"""A process that stands by: it has been started, has imported what takes seconds, and waits for the word to go on.

It takes the place of one that was lost, which is then there again in the time that loading its model takes. Until then
it costs the memory of its imports and nothing else. Its start takes seconds of processor time, which after a loss are
needed to compute again what everybody waits for: so it comes a while later. Knows nothing of what the process does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

Process = subprocess.Popen[bytes]

#: How long after it is asked for a process is started, in seconds.
PAUSE_SECONDS = 5.0

_GO = b"\n"


def stand_by() -> None:
    """In the process itself: wait for the word on standard input. Ends the process if it will never come."""
    if not sys.stdin.buffer.readline():
        os._exit(0)


def let_go(process: Process) -> bool:
    """Tell a process that stands by, or will soon, to go on; whether there was anybody to hear it."""
    assert process.stdin is not None
    try:
        process.stdin.write(_GO)
        process.stdin.close()
    except OSError:
        return False
    return process.poll() is None


class Spare:
    """At most one process that stands by, made by `start`, from a thread of its own."""

    def __init__(self, name: str, start: Callable[[], Process]) -> None:
        self._start = start
        self._changed = threading.Condition()
        self._is_wanted = self._is_closed = False
        self._process: Process | None = None
        # To the system this thread is the parent of what it starts, so it lives as long as that may.
        self._thread = threading.Thread(target=self._run, name=f"bridle-{name}-spare", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The process that stands by, if there is one."""
        process = self._process
        return None if process is None else process.pid

    def prepare_nowait(self) -> None:
        """Have one from `PAUSE_SECONDS` on, and as long as its start takes."""
        with self._changed:
            self._is_wanted = True
            self._changed.notify_all()

    def take(self) -> Process | None:
        """The one that stands by, told to go on; None if there is none, or it ended by itself."""
        with self._changed:
            process, self._process = self._process, None
            self._is_wanted = False
            self._changed.notify_all()
        if process is None or let_go(process):
            return process
        process.kill()
        process.wait()
        return None

    def close(self) -> None:
        """End the one that stands by. Those that were taken must have ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._is_closed:
                self._changed.wait_for(lambda: self._is_wanted or self._is_closed)
                self._changed.wait_for(lambda: not self._is_wanted or self._is_closed, PAUSE_SECONDS)
                if self._is_wanted and not self._is_closed and self._process is None:
                    self._process = self._start()
                    self._changed.notify_all()
                self._is_wanted = False
            if self._process is not None:
                self._process.kill()
                self._process.communicate()
