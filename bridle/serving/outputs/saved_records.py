"""Records of users: bounded, kept for some time after their last change, and saved if there is a state file."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from bridle.serving.state_db import StateTable
from bridle.serving.tenancy.per_user_store import PerUserStore, StoreBounds


class Record(Protocol):
    """A record's owner and its name."""

    @property
    def user(self) -> str: ...
    @property
    def id(self) -> str: ...


R = TypeVar("R", bound=Record)


class SavedRecords(Generic[R]):
    """Keeps records of a dataclass; with a `table`, also those that were saved there. Records are not changed: `put`
    replaces them."""

    def __init__(
        self,
        kind: type[R],
        bounds: StoreBounds,
        clock: Callable[[], float] = time.monotonic,
        table: StateTable | None = None,
    ) -> None:
        self._store: PerUserStore[R] = PerUserStore(bounds, clock)
        self._table = table
        self.bounds = bounds
        if table is not None:
            self._store.on_drop = table.drop
            for user, name, seconds, value in table.rows():
                self._store.keep(user, name, msgspec.msgpack.decode(value, type=kind), len(value), seconds)

    def put(self, record: R) -> bool:
        """Keep a record, in place of one of the same name. Return False if there is no room for it."""
        value = msgspec.msgpack.encode(record)
        if not self._store.keep(record.user, record.id, record, len(value)):
            return False
        if self._table is not None:
            self._table.put(record.user, record.id, self.bounds.seconds, value)
        return True

    def find(self, user: str, name: str) -> R | None:
        """A record of a user; None if it is absent or expired."""
        return self._store.find(user, name)

    def drop(self, user: str, name: str) -> None:
        """Forget a record; unknown ones are ignored."""
        self._store.drop(user, name)

    def of(self, user: str | None = None) -> list[R]:
        """The records of a user, or of all users (None), the least recently changed first."""
        return self._store.values(user)
