"""Records of users. The number and the bytes of a user's records are limited. Records are kept for some time after
their last change, and are saved in a state file."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from bridle.errors import InvalidRequest, Overloaded
from bridle.safe_repr import short_repr
from bridle.serving.state_db import StateTable
from bridle.serving.tenancy.per_user_store import PerUserStore, StoreBounds


class Record(Protocol):
    """A record that has its owner and its name."""

    @property
    def user(self) -> str: ...
    @property
    def id(self) -> str: ...


R = TypeVar("R", bound=Record)


class SavedRecords(Generic[R]):
    """Keeps records of the dataclass `kind`. With a state `table`, the store also has the records that were saved in
    the table. Records are not modified; `put` replaces them. `noun`, `plural` and `advice` are words for error
    messages. `advice` has a placeholder for a number of seconds."""

    kind: ClassVar[type[Any]]
    unknown: ClassVar[type[InvalidRequest]]
    noun: ClassVar[str]
    plural: ClassVar[str]
    advice: ClassVar[str]
    usual: ClassVar[StoreBounds]

    def __init__(
        self,
        bounds: StoreBounds | None = None,
        clock: Callable[[], float] = time.monotonic,
        table: StateTable | None = None,
    ) -> None:
        self.bounds = bounds or self.usual
        self._store: PerUserStore[R] = PerUserStore(self.bounds, clock)
        self._table = table
        if table is not None:
            self._store.on_drop = table.drop
            for user, name, seconds, value in table.rows():
                self._store.keep(user, name, msgspec.msgpack.decode(value, type=self.kind), len(value), seconds)

    def put(self, record: R) -> R:
        """Store a record. A record with the same name is replaced. Raises `Overloaded` if there is no room for the
        record."""
        value = msgspec.msgpack.encode(record)
        if not self._store.keep(record.user, record.id, record, len(value)):
            raise Overloaded(f"the {self.plural} of other users fill the storage; try again later")
        if self._table is not None:
            self._table.put(record.user, record.id, self.bounds.seconds, value)
        return record

    def find(self, user: str, name: str, param: str | None = None) -> R:
        """Return a record of a user. If the user has no record of this name, raises an error of type `unknown` that
        names the field `param`."""
        found = self._store.find(user, name)
        if found is None:
            advice = self.advice.format(self.bounds.seconds)
            message = f"{param or self.noun}: no {self.noun} {short_repr(name)} is kept for this user; {advice}"
            raise self.unknown(message, param)
        return found

    def delete(self, user: str, name: str) -> None:
        """Delete a record. Raises an error of type `unknown` if the user has no record of this name."""
        self.find(user, name)
        self._store.drop(user, name)

    def of(self, user: str | None = None) -> list[R]:
        """Return the records of a user, or of all users (None), the least recently changed first."""
        return self._store.values(user)
