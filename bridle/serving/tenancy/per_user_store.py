"""Values that are kept for users for a limited time. The number and the bytes of values are limited, per user and in
total. A value is visible only to its user. If a user exceeds a limit, the oldest entry of the user is evicted. If a
total limit is exceeded, the oldest entry of the user with the most entries (or bytes) is evicted. So no user can evict
entries of others by storing too much. Times come from the given clock. The store does not interpret the values."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

V = TypeVar("V")
#: Bytes that an entry takes in addition to its value.
OVERHEAD = 512

Name = tuple[str, str]  # name of a user, name of an entry


@dataclass(frozen=True, slots=True)
class StoreBounds:
    """Limits: the seconds for which an entry is kept, and the number of entries and bytes, in total and per user."""

    seconds: float
    max_entries: int
    max_of_user: int
    max_bytes: int
    max_bytes_of_user: int


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V
    num_bytes: int
    until: float


@dataclass(slots=True)
class _Share:
    """Entries of one user."""

    names: OrderedDict[Name, None] = field(default_factory=OrderedDict)  # names of entries, the oldest first
    num_bytes: int = 0


class PerUserStore(Generic[V]):
    """A store of values by user and name. Safe from any thread. The bytes of an entry include a fixed overhead."""

    def __init__(self, bounds: StoreBounds, clock: Callable[[], float] = time.monotonic) -> None:
        self.bounds = bounds
        self.num_bytes = self.num_dropped = 0  # dropped before they expired, or not stored, for lack of room
        self.on_drop: Callable[[str, str], object] = lambda user, name: None
        self._clock = clock
        self._lock = threading.Lock()
        self.entries: OrderedDict[Name, _Entry[V]] = OrderedDict()  # the oldest first
        self.shares: dict[str, _Share] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def keep(self, user: str, name: str, value: V, num_bytes: int, seconds: float | None = None) -> bool:
        """Store a value. A value with the same name is replaced. Returns False and stores nothing if the value is
        larger than one user's limit, or than the room that other users leave. Entries with given remaining `seconds`
        must be added before all others, in the order in which they expire."""
        bounds, size = self.bounds, num_bytes + OVERHEAD
        with self._lock:
            self._expire()
            self._drop((user, name))
            if size > min(bounds.max_bytes_of_user, bounds.max_bytes) or not bounds.seconds:
                self.num_dropped += 1
                return False
            self.entries[user, name] = _Entry(
                value, size, self._clock() + (bounds.seconds if seconds is None else seconds)
            )
            self.shares.setdefault(user, _Share()).names[user, name] = None
            self._count(user, size)
            self._keep_bounds(user)
            return (user, name) in self.entries

    def find(self, user: str, name: str) -> V | None:
        """Return the value with this name of a user; None if it is missing or expired."""
        with self._lock:
            self._expire()
            entry = self.entries.get((user, name))
            return None if entry is None else entry.value

    def values(self, user: str | None) -> list[V]:
        """Return the values of a user, or of all users (None), the oldest first."""
        with self._lock:
            self._expire()
            share = self.shares.get(user) if user is not None else None
            names = self.entries if user is None else () if share is None else share.names
            return [self.entries[name].value for name in names]

    def drop(self, user: str, name: str) -> None:
        """Delete an entry; unknown names are ignored."""
        with self._lock:
            self._drop((user, name))

    def resize(self, user: str, name: str, value: V, num_bytes: int) -> None:
        """Set the real size of a value. The size was estimated when the value was stored. Does nothing if another value
        is stored under the name by now."""
        with self._lock:
            entry = self.entries.get((user, name))
            if entry is not None and entry.value is value:
                self._count(user, num_bytes + OVERHEAD - entry.num_bytes)
                entry.num_bytes = num_bytes + OVERHEAD
                self._keep_bounds(user)

    # -- helpers -------------------------------------------------------------------------------------------

    def _count(self, user: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.shares[user].num_bytes += num_bytes

    def _keep_bounds(self, user: str) -> None:
        bounds = self.bounds
        for name in self._too_much(user):
            self._drop(name)
            self.num_dropped += 1
        while len(self.entries) > bounds.max_entries:
            self._drop_of(max(self.shares.values(), key=lambda share: len(share.names)))
        while self.num_bytes > bounds.max_bytes:
            self._drop_of(max(self.shares.values(), key=lambda share: share.num_bytes))

    def _too_much(self, user: str) -> Iterator[Name]:
        """Yield the oldest entries of a user, as long as the user exceeds a limit."""
        while (share := self.shares.get(user)) is not None and (
            len(share.names) > self.bounds.max_of_user or share.num_bytes > self.bounds.max_bytes_of_user
        ):
            yield next(iter(share.names))

    def _drop_of(self, share: _Share) -> None:
        self._drop(next(iter(share.names)))
        self.num_dropped += 1

    def _expire(self) -> None:
        now = self._clock()
        while self.entries and next(iter(self.entries.values())).until <= now:
            self._drop(next(iter(self.entries)))

    def _drop(self, name: Name) -> None:
        entry = self.entries.pop(name, None)
        if entry is None:
            return
        self.on_drop(*name)
        share = self.shares[name[0]]
        del share.names[name]
        self._count(name[0], -entry.num_bytes)
        if not share.names:
            del self.shares[name[0]]
