"""Tells a process that hangs from one that a busy machine keeps waiting.

Either shows no sign of life in time. To end and start again what only waits for a processor makes a busy machine
busier, and the next process is as late. One that was stopped, or whose threads wait for each other, wants no processor.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

#: A process that wants a processor may be silent for so many seconds; a loop without end wants one as well.
HELD_UP_SECONDS = 15.0
#: Linux's letters for a thread that runs or could run, and for one that waits for a disk (see `proc_pid_stat(5)`).
_WANTING = frozenset("RD")


def is_held_up(pid: int) -> bool:
    """Return whether a local process waits for a processor or a disk, and so need not hang; False if unknown."""
    with contextlib.suppress(OSError):
        return any(state(stat) in _WANTING for stat in Path(f"/proc/{pid}/task").glob("*/stat"))
    return False


def state(stat: Path) -> str:
    """The state of a thread; empty once it has ended."""
    with contextlib.suppress(OSError):
        return stat.read_text().rpartition(")")[2].split()[0]  # the name before it may hold anything
    return ""
