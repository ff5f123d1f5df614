"""How much memory the control groups of this process leave it: what containers and service managers set.

Linux has two versions of them, which may be mounted at once. Elsewhere there is no such limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
#: By version: the files with the limit and with what is in use, and the statistic of what the kernel can drop of that.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def memory_room(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Bytes that may still be taken before the tightest limit; None if there is none."""
    rooms = (_room(folder, version) for folder, version in _folders(root, membership))
    return min((room for room in rooms if room is not None), default=None)


def _folders(root: Path, membership: Path) -> Iterator[tuple[Path, int]]:
    """The groups that this process is in, each with those around it."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        mounts, version = [root, root / "unified"], 2
        if number != "0":
            mounts, version = [root / "memory"] if "memory" in controllers.split(",") else [], 1
        inner = Path(path.lstrip("/"))
        for mount in mounts:
            # In a container the mount may show its own group as the top: what is not there is passed over.
            yield from ((mount / part, version) for part in (inner, *inner.parents))


def _room(folder: Path, version: int) -> int | None:
    limit_name, usage_name, droppable_name = _FILES[version]
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return None
        usage = int((folder / usage_name).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(int(limit) - usage + int(statistics.get(droppable_name, 0)), 0)
    except (OSError, ValueError):
        return None
