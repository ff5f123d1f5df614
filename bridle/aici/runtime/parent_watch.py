"""Ends a runtime together with the engine that started it.

A bridle engine connects the runtime's standard input to a pipe before it creates shared memory. A byte in the pipe
reports that all shared objects exist. So either the engine or the runtime can always remove the shared memory. Without
a pipe, the runtime watches its parent process, whose id it must read before that process can end.
"""

from __future__ import annotations

import contextlib
import os
import select

_STDIN = 0


class ParentWatch:
    """Watches the process `parent`, which started this process. `is_piped` means that the parent holds a pipe to this
    process's standard input. `stays` means that the runtime outlives its parent."""

    def __init__(self, parent: int, *, is_piped: bool = False, stays: bool = False) -> None:
        self._parent = parent
        self._is_piped = is_piped
        self._stays = stays

    def await_word(self) -> bool:
        """Wait until the shared objects exist. Returns False if the engine ended first."""
        return not self._is_piped or bool(os.read(_STDIN, 1))

    def holds(self) -> bool:
        """Return whether this process should continue: the parent still runs, or `stays` is set. Safe from any
        thread."""
        if self._stays:
            return True
        return os.getppid() == self._parent and not (self._is_piped and _has_hung_up())


def _has_hung_up() -> bool:
    poll = select.poll()  # one object per call, because only one thread may use an object
    poll.register(_STDIN, 0)  # a hang-up is always reported
    return bool(poll.poll(0))


def fork_watched() -> tuple[int, int]:
    """Fork a child. Returns the child's id and handle (pidfd), and (0, -1) in the child. The child waits until its
    handle exists, because an ended child is reaped automatically and then cannot get a handle. Safe from any thread."""
    ready, go = os.pipe()
    with open(ready, "rb", buffering=0) as waiting, open(go, "wb", buffering=0) as going:
        pid = os.fork()
        if pid == 0:
            going.close()
            waiting.read(1)
            return 0, -1
        with contextlib.suppress(ProcessLookupError):
            return pid, os.pidfd_open(pid)
    return pid, _handle_of_an_end()  # the child was killed before it began


def _handle_of_an_end() -> int:
    """Return the handle of a child process that ends at once. This handle represents a process that was killed before
    it had a handle."""
    pid, handle = fork_watched()
    if pid == 0:
        os._exit(0)
    return handle
