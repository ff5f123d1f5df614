"""Session affinity: a request goes to the replica that retains the KV of its conversation.

A prompt that begins with all whole blocks of a conversation with retained KV goes to that conversation's replica, even
if the replica is busy. Any other replica would compute the KV again. The records may be wrong, because a replica may
have evicted the KV. This module does no I/O; the caller passes the time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from bridle.distributed.prefix_router import PrefixChoice, chain_of
from bridle.engine.kv.kv_retention import MAX_PARKED


class _Home(NamedTuple):
    replica: int
    end: int  # hash of the chain of blocks
    num_tokens: int
    until: float


class SessionAffinity:
    """The replicas of conversations with retained KV. The latest `max_homes` conversations are remembered."""

    def __init__(self, block_size: int, seconds: float, max_homes: int = 4 * MAX_PARKED) -> None:
        self._block_size, self._seconds, self._max_homes = block_size, seconds, max_homes
        self.homes: OrderedDict[str, _Home] = OrderedDict()  # by request id, the next to expire first
        self.ends: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.homes)

    def keep(self, request_id: str, tokens: Sequence[int], salt: object, replica: int, now: float) -> None:
        """Record that a replica retains the KV of a conversation with these tokens."""
        chain = chain_of(tokens, salt, self._block_size)
        if not chain or not self._seconds:
            return
        self._drop(request_id)
        if (other := self.ends.get(chain[-1])) is not None:
            self._drop(other)
        num_tokens = len(chain) * self._block_size
        self.homes[request_id] = _Home(replica, chain[-1], num_tokens, now + self._seconds)
        self.ends[chain[-1]] = request_id
        self._expire(now)

    def find(self, prompt: Sequence[int], salt: object, now: float, request_id: str = "") -> PrefixChoice | None:
        """Return the replica that retains the KV of the prompt's prefix, or of the conversation of an earlier request.
        Also return the number of retained tokens. Returns None if no replica retains the KV."""
        self._expire(now)
        if not self.homes:
            return None
        if (known := self.homes.get(request_id)) is not None:
            return PrefixChoice(known.replica, min(known.num_tokens, len(prompt) - 1))
        for end in reversed(chain_of(prompt, salt, self._block_size)):
            if end in self.ends:
                home = self.homes[self.ends[end]]
                return PrefixChoice(home.replica, home.num_tokens)
        return None

    def release(self, request_id: str) -> int | None:
        """Forget the conversation that a request has left. Returns the conversation's replica, or None if unknown."""
        home = self._drop(request_id)
        return None if home is None else home.replica

    def forget(self, replica: int) -> None:
        """Record that the replica has lost its cache."""
        for request_id in [request_id for request_id, home in self.homes.items() if home.replica == replica]:
            self._drop(request_id)

    def _expire(self, now: float) -> None:
        while self.homes:
            request_id, home = next(iter(self.homes.items()))
            if home.until > now and len(self.homes) <= self._max_homes:
                return
            self._drop(request_id)

    def _drop(self, request_id: str) -> _Home | None:
        home = self.homes.pop(request_id, None)
        if home is not None:
            del self.ends[home.end]
        return home
