"""Limits of this process: memory, processor time, and the number of cores that it may use.

Containers and service managers limit memory and processor time with control groups (cgroups).

Linux has two versions of control groups, which may be mounted at the same time. Other systems than Linux have no
control groups.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
#: For each version of control groups: the file with the limit, the file with the memory in use, and the statistic of
#: memory that the kernel can drop.
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def memory_room(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the number of bytes that may still be allocated under the tightest limit; None if there is no limit."""
    rooms = (_room(folder, version) for folder, version in _folders("memory", root, membership))
    return min((room for room in rooms if room is not None), default=None)


def num_cores(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int:
    """Return the number of cores that this process may use, at least 1. The number is that of the available cores, or
    the limit on processor time if that is lower."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = (_share(folder, version) for folder, version in _folders("cpu", root, membership))
    return max(min([allowed, *(math.ceil(share) for share in shares if share is not None)]), 1)


def _folders(controller: str, root: Path, membership: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folders of this process's control groups, from the innermost to the outermost."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        mounts, version = [root, root / "unified"], 2
        if number != "0":
            mounts, version = [root / controller] if controller in controllers.split(",") else [], 1
        inner = Path(path.lstrip("/"))
        for mount in mounts:
            # In a container the mount may show its own group as the top; missing folders are skipped.
            yield from ((mount / part, version) for part in (inner, *inner.parents))


def _room(folder: Path, version: int) -> int | None:
    limit_name, usage_name, droppable_name = _MEMORY_FILES[version]
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return None
        usage = int((folder / usage_name).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(int(limit) - usage + int(statistics.get(droppable_name, 0)), 0)
    except (OSError, ValueError):
        return None


def _share(folder: Path, version: int) -> float | None:
    """Return the limit on processor time, in processor seconds per second; None if there is no limit."""
    try:
        if version == 2:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
