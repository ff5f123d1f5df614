"""Remembers adapters that recently could not be used, with the reason, so that many requests for such an adapter read
the files only once.

A failure is remembered until the adapter's files change (their times or sizes) or some seconds have passed. So a
repaired adapter works at once, and bridle tries an unchanged adapter again after some seconds.
"""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

from bridle.errors import BridleError
from bridle.lora.files import CONFIG_NAME, WEIGHTS_NAME

#: Seconds for which a failure is remembered while the adapter's files do not change.
FAILURE_SECONDS = 30.0
MAX_FAILURES = 1_000

#: The state of an adapter's files: time of change, size and inode of each; None for a missing file.
Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class CachedFailure:
    """The error that adapter files with the times and sizes `stamp` caused. The error is remembered until the time
    `until` on the owner's clock."""

    error: BridleError
    folder: Path | None
    stamp: Stamp
    until: float

    def __post_init__(self) -> None:
        # The copy has no traceback, whose frames would keep alive everything that was read.
        object.__setattr__(self, "error", copy.copy(self.error))

    def holds(self, now: float) -> bool:
        """Return whether an attempt at time `now` would fail again: the files are unchanged, and the time `until` is
        not reached."""
        return now < self.until and stamp_of(self.folder) == self.stamp

    def again(self) -> BridleError:
        """Return a copy of the stored error, because each client gets its own exception object."""
        return copy.copy(self.error)


def stamp_of(folder: Path | None) -> Stamp:
    """Return the modification times and sizes of the adapter files in `folder`. Callers call this function before they
    read the files, so that a later change is noticed."""
    return () if folder is None else tuple(_stamp(folder / name) for name in (CONFIG_NAME, WEIGHTS_NAME))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class Failures:
    """The recent failures of unregistered adapters, by a key that the caller chooses. Beyond a limit, the oldest
    failures are dropped."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[Hashable, CachedFailure] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def note(self, key: Hashable, failure: CachedFailure) -> None:
        self._by_key[key] = failure
        self._by_key.move_to_end(key)
        if len(self._by_key) > MAX_FAILURES:
            self._by_key.popitem(last=False)

    def find(self, key: Hashable, now: float) -> CachedFailure | None:
        """Return the remembered failure for `key` if it is still valid, otherwise None."""
        failure = self._by_key.get(key)
        if failure is None or failure.holds(now):
            return failure
        del self._by_key[key]
        return None

    def forget(self, key: Hashable) -> None:
        self._by_key.pop(key, None)
