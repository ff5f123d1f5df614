"""A child process that is restarted when it ends: at once, then after longer pauses if it ends again and again.

A thread starts the process and waits for its end, until the child is closed. If there is a standby process, it replaces
the ended process. This module works for processes with any task. The caller calls `prove` when the process has
completed some work.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Sequence

from bridle.distributed.child_process import child_environment
from bridle.launch.warm_standby import Process, WarmStandby, let_go

_log = logging.getLogger(__name__)

#: Seconds before a process is restarted, by the number of lives in a row in which it did not work; the last value
#: repeats.
_PAUSES = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_TERM_SECONDS = 5.0


class SupervisedProcess:
    """A child process that is started with a command line. If the process ends before `keep` is called, it is not
    restarted, and `has_failed` is true. After `keep`, the process is restarted whenever it ends, until `close`.

    If `stands_by`, the program must begin with `wait_for_activation`; after `prove`, a standby process is kept ready.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, stands_by: bool = False, pauses: Sequence[float] = _PAUSES
    ) -> None:
        self.name = name
        self.num_ends = 0
        self.status: int | None = None  # exit status of the last process
        self.command = list(command)  # command of the next start
        self.environment: dict[str, str] = {}  # additional environment of the next start
        self.pauses = pauses
        self.changed = threading.Condition()
        self._process: Process | None = None
        self.spare = WarmStandby(name, self._launch) if stands_by else None
        self._is_kept = False
        self._is_proven = False  # the current process has worked
        self._is_closed = False
        # Linux treats this thread as the parent of the process, so the thread must live as long as the process.
        self._thread = threading.Thread(target=self._run, name=f"bridle-{name}", daemon=True)
        self._thread.start()

    # -- public methods, for any thread --------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """Return the process id; None if the process does not run."""
        process = self._process
        return None if process is None else process.pid

    @property
    def has_failed(self) -> bool:
        """Return whether the first process ended before `keep` was called."""
        return self.num_ends > 0 and not self._is_kept

    def keep(self) -> None:
        """Record that the start was successful. From now on, the process is restarted whenever it ends."""
        with self.changed:
            self._is_kept = True
            self.changed.notify_all()

    def prove(self, pid: int) -> None:
        """Record that process `pid` has completed some work, so that its replacement starts without a pause."""
        with self.changed:
            if self._process is None or self._process.pid != pid:
                return
            self._is_proven = True
        if self.spare is not None:
            self.spare.prepare_nowait()

    def kill(self, pid: int | None = None) -> None:
        """Kill the process, even if it is stopped. A killed process is restarted. If `pid` is given, kill the process
        only if it has this id."""
        with self.changed:
            process = self._process
            if process is not None and pid in (None, process.pid):
                process.kill()

    def close(self) -> None:
        """End the process permanently: first with SIGTERM, then by killing it. Idempotent."""
        with self.changed:
            self._is_closed = True
            process = self._process
            self.changed.notify_all()
        if process is not None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TERM_SECONDS)
            process.kill()
        self._thread.join()
        if self.spare is not None:
            self.spare.close()

    # -- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        num_useless = 0  # processes in a row that did not work
        while (process := self._start()) is not None:
            born = time.monotonic()
            status = process.wait()
            num_useless = 0 if self._is_proven else num_useless + 1
            pause = self.pauses[min(num_useless, len(self.pauses) - 1)]
            if not self._note_end(process, status, time.monotonic() - born, pause):
                return

    def _start(self) -> Process | None:
        with self.changed:
            if self._is_closed:
                return None
            process = self.spare.take() if self.spare is not None else None
            how = "started" if process is None else "replaced by its standby process"
            if process is None:
                process = self._launch()
                if self.spare is not None:
                    let_go(process)
            self._process, self._is_proven = process, False
        _log.info("%s %s, pid %d", self.name, how, process.pid)
        return process

    def _launch(self) -> Process:
        """Start a process. The process gets its own session, so that Ctrl-C in a terminal reaches only the parent,
        which then ends its children."""
        stdin = subprocess.DEVNULL if self.spare is None else subprocess.PIPE
        environment = child_environment() | self.environment
        return subprocess.Popen(self.command, stdin=stdin, env=environment, start_new_session=True)  # noqa: S603

    def _note_end(self, process: Process, status: int, lived: float, pause: float) -> bool:
        """Record the end of a process, and wait for the pause. Returns whether to restart the process."""
        with self.changed:
            self._process, self.status = None, status
            self.num_ends += 1
            self.changed.notify_all()
            if self._is_closed:
                return False
            _log.error("%s (pid %d) ended after %.1f s: %s", self.name, process.pid, lived, describe(status))
            self.changed.wait_for(lambda: self._is_kept or self._is_closed)
            if pause:
                _log.info("%s restarts in %g s", self.name, pause)
            self.changed.wait_for(lambda: self._is_closed, pause)
            return not self._is_closed


def describe(status: int) -> str:
    """Describe an exit status for an error message."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
