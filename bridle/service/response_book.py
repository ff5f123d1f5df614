"""Responses that clients refer to later: what was said up to each, and what it answered.

They are kept in memory as JSON, within bounds for all users and for one, and for some time. A response holds all items
before it, so that it can be gone on from when earlier ones are gone. Nobody finds those of others. Knows no items: they
are plain data.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bridle.errors import UnknownResponse
from bridle.shown import shown

#: What is kept of all users and of one, in responses and in bytes, and for how many seconds.
MAX_RESPONSES, MAX_OF_USER = 16_384, 1_024
MAX_BYTES, MAX_BYTES_OF_USER = 256 << 20, 64 << 20
MAX_AGE = 3_600.0
_OVERHEAD = 512  # of an entry, in bytes


@dataclass(frozen=True, slots=True)
class _Entry:
    user: str
    until: float
    response: bytes
    said: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.said) + _OVERHEAD


@dataclass(slots=True)
class _Share:
    """What is kept of one user."""

    ids: OrderedDict[tuple[str, str], None] = field(default_factory=OrderedDict)
    num_bytes: int = 0


@dataclass(slots=True)
class ResponseBook:
    """Keeps responses. Its methods belong to one event loop."""

    max_responses: int = MAX_RESPONSES
    max_of_user: int = MAX_OF_USER
    max_bytes: int = MAX_BYTES
    max_bytes_of_user: int = MAX_BYTES_OF_USER
    max_age: float = MAX_AGE
    clock: Callable[[], float] = time.monotonic
    num_bytes: int = 0
    _entries: OrderedDict[tuple[str, str], _Entry] = field(default_factory=OrderedDict)  # the oldest first
    _shares: dict[str, _Share] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, user: str, response: dict[str, Any], said: Sequence[Any]) -> bool:
        """Keep a response and what was said before it. Returns False, and keeps nothing, if it is larger than all that
        one user may have."""
        self._expire()
        encode = msgspec.json.encode
        entry = _Entry(user, self.clock() + self.max_age, encode(response), encode(list(said)))
        if entry.num_bytes > min(self.max_bytes_of_user, self.max_bytes):
            return False
        name = user, str(response["id"])
        self._drop(name)
        share = self._shares.setdefault(user, _Share())
        self._entries[name] = entry
        share.ids[name] = None
        share.num_bytes += entry.num_bytes
        self.num_bytes += entry.num_bytes
        while len(share.ids) > self.max_of_user or share.num_bytes > self.max_bytes_of_user:
            self._drop(next(iter(share.ids)))
        while len(self._entries) > self.max_responses or self.num_bytes > self.max_bytes:
            biggest = max(self._shares.values(), key=lambda each: each.num_bytes)
            self._drop(next(iter(biggest.ids)))
        return name in self._entries

    def response(self, user: str, name: str) -> dict[str, Any]:
        """A response as it was given. Raises `UnknownResponse`."""
        found: dict[str, Any] = msgspec.json.decode(self._find(user, name).response)
        return found

    def said(self, user: str, name: str) -> list[Any]:
        """The items that a response answers. Raises `UnknownResponse`."""
        found: list[Any] = msgspec.json.decode(self._find(user, name).said)
        return found

    def delete(self, user: str, name: str) -> None:
        """Forget a response. Raises `UnknownResponse`."""
        self._find(user, name)
        self._drop((user, name))

    def _find(self, user: str, name: str) -> _Entry:
        self._expire()
        entry = self._entries.get((user, name))
        if entry is None:
            raise UnknownResponse(
                f"no response {shown(name)} is kept for this user; they are kept for {self.max_age:g} s, within bounds"
            )
        return entry

    def _expire(self) -> None:
        now = self.clock()
        while self._entries and next(iter(self._entries.values())).until <= now:
            self._drop(next(iter(self._entries)))

    def _drop(self, name: tuple[str, str]) -> None:
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        share = self._shares[entry.user]
        del share.ids[name]
        share.num_bytes -= entry.num_bytes
        self.num_bytes -= entry.num_bytes
        if not share.ids:
            del self._shares[entry.user]
