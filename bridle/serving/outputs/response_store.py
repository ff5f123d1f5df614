"""Stored responses that clients refer to later, each with the items before it.

Responses are kept in memory as JSON for some time, within limits for each user and for all users together. With a state
file, responses are also saved in that file and survive a restart. A stored response contains all items before it. So a
response can be continued even if earlier responses were dropped. Users cannot access the responses of other users.
Items are plain data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from bridle.errors import UnknownResponse
from bridle.safe_repr import short_repr
from bridle.serving.state_db import StateTable
from bridle.serving.tenancy.per_user_store import PerUserStore, StoreBounds

#: Limits: seconds (an hour), number of responses of all users and of one, bytes of all users and of one.
BOUNDS = StoreBounds(3_600.0, 16_384, 1_024, 256 << 20, 64 << 20)
#: Limits with a state file, where responses are kept for 30 days.
SAVED_BOUNDS = replace(BOUNDS, seconds=30 * 86_400.0)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A stored response and the items before it, as JSON."""

    response: bytes
    input_items: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.input_items)


class ResponseStore:
    """Keeps responses. With a state `table`, the store also has the responses that were saved there."""

    def __init__(
        self, bounds: StoreBounds = BOUNDS, clock: Callable[[], float] = time.monotonic, table: StateTable | None = None
    ) -> None:
        self._store: PerUserStore[_Kept] = PerUserStore(bounds, clock)
        self._table = table
        if table is not None:
            self._store.on_drop = table.drop
            for user, name, seconds, value in table.rows():
                kept = _Kept(*msgspec.msgpack.decode(value, type=tuple[bytes, bytes]))
                self._store.keep(user, name, kept, kept.num_bytes, seconds)

    def __len__(self) -> int:
        return len(self._store)

    def keep(self, user: str, response: dict[str, Any], input_items: Sequence[Any]) -> bool:
        """Store a response and the items before it. Returns False and stores nothing if the response is larger than the
        limit for one user."""
        kept = _Kept(msgspec.json.encode(response), msgspec.json.encode(list(input_items)))
        name = str(response["id"])
        is_kept = self._store.keep(user, name, kept, kept.num_bytes)
        if is_kept and self._table is not None:
            value = msgspec.msgpack.encode((kept.response, kept.input_items))
            self._table.put(user, name, self._store.bounds.seconds, value)
        return is_kept

    def response(self, user: str, name: str) -> dict[str, Any]:
        """Return a response as it was stored. Raises `UnknownResponse`."""
        found: dict[str, Any] = msgspec.json.decode(self._find(user, name).response)
        return found

    def input_items(self, user: str, name: str) -> list[Any]:
        """Return the items to which a response is the answer. Raises `UnknownResponse`."""
        found: list[Any] = msgspec.json.decode(self._find(user, name).input_items)
        return found

    def delete(self, user: str, name: str) -> None:
        """Delete a response. Raises `UnknownResponse`."""
        self._find(user, name)
        self._store.drop(user, name)

    def _find(self, user: str, name: str) -> _Kept:
        kept = self._store.find(user, name)
        if kept is None:
            raise UnknownResponse(
                f"no response {short_repr(name)} is kept for this user; responses are kept for at most "
                f"{self._store.bounds.seconds:g} s"
            )
        return kept
