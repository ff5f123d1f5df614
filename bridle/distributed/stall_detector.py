"""Distinguishes a hanging process from one that waits for a busy machine.

Neither a hanging nor a waiting process sends a heartbeat in time. Restarting a process that waits for a processor would
make the machine busier, and the new process would be late too. A stopped or deadlocked process does not wait for a
processor.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

#: Seconds that a process which waits for a processor may be silent. An endless loop waits for a processor as well.
HELD_UP_SECONDS = 15.0
#: Linux's letters for a thread that runs or is runnable, and for a thread that waits for a disk (see
#: `proc_pid_stat(5)`).
_WANTING = frozenset("RD")


def is_held_up(pid: int) -> bool:
    """Return whether a local process is late because it waits for a processor or a disk; False if unknown."""
    with contextlib.suppress(OSError):
        return any(state(stat) in _WANTING for stat in Path(f"/proc/{pid}/task").glob("*/stat"))
    return False


def state(stat: Path) -> str:
    """Return the state letter in a thread's `stat` file; empty if the thread has ended."""
    with contextlib.suppress(OSError):
        return stat.read_text().rpartition(")")[2].split()[0]  # the name before it may contain any characters
    return ""
