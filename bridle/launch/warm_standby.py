"""A standby process that has imported the slow modules and waits for a line on its standard input.

A standby process replaces a process that was lost, so that the replacement only has to load its model. While a standby
process waits, it needs only the memory of its imports. After a loss, waiting requests need the processor, so the next
standby process starts later. This module works for processes with any task.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

Process = subprocess.Popen[bytes]

#: Seconds between the request for a standby process and its start.
PAUSE_SECONDS = 5.0

_GO = b"\n"


def wait_for_activation() -> None:
    """In the standby process, wait for a line on standard input. If standard input is closed without a line, end the
    process."""
    if not sys.stdin.buffer.readline():
        os._exit(0)


def let_go(process: Process) -> bool:
    """Activate a standby process. Returns whether the process still ran."""
    assert process.stdin is not None
    try:
        process.stdin.write(_GO)
        process.stdin.close()
    except OSError:
        return False
    return process.poll() is None


class WarmStandby:
    """Keeps at most one standby process, which `start` creates in a separate thread."""

    def __init__(self, name: str, start: Callable[[], Process]) -> None:
        self._start = start
        self.changed = threading.Condition()
        self._is_wanted = self._is_closed = False
        self._process: Process | None = None
        # Linux treats this thread as the parent of the processes that it starts, so the thread must live as long as
        # they do.
        self._thread = threading.Thread(target=self._run, name=f"bridle-{name}-spare", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Return the process id of the standby process; None if there is none."""
        process = self._process
        return None if process is None else process.pid

    def prepare_nowait(self) -> None:
        """Start a standby process after `PAUSE_SECONDS`, in the background."""
        with self.changed:
            self._is_wanted = True
            self.changed.notify_all()

    def take(self) -> Process | None:
        """Activate and return the standby process. Returns None if no standby process exists or if it has ended."""
        with self.changed:
            process, self._process = self._process, None
            self._is_wanted = False
            self.changed.notify_all()
        if process is None or let_go(process):
            return process
        process.kill()
        process.wait()
        return None

    def close(self) -> None:
        """End the standby process. Processes that `take` returned must have ended."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        with self.changed:
            while not self._is_closed:
                self.changed.wait_for(lambda: self._is_wanted or self._is_closed)
                self.changed.wait_for(lambda: not self._is_wanted or self._is_closed, PAUSE_SECONDS)
                if self._is_wanted and not self._is_closed and self._process is None:
                    self._process = self._start()
                    self.changed.notify_all()
                self._is_wanted = False
            if self._process is not None:
                self._process.kill()
                self._process.communicate()
