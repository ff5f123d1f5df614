"""Parked KV of conversations, protected from eviction for a while because it will be used again soon.

A client that received a tool call comes back with the answer, and its next prompt begins with all that was computed so
far. Until then the blocks are free ones, like those of the prefix cache, so running requests can always use them; but
they are evicted last. A parked conversation is a list of block hashes. It ends when a request continues it, when its
time is over, when its client releases it, or when others need the room. In the last case the user with the most parked
blocks loses blocks: from the end of its oldest conversation.

This module knows hashes, users and times, but not blocks. Users never share a hash: a user's name begins every chain.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from bridle.errors import InternalError

#: How many conversations a user parks at most, and all users together.
MAX_OF_USER, MAX_PARKED = 256, 4_096

Key = tuple[str, int]  # of a request and one of its outputs


@dataclass(slots=True)
class RetainedPrefix:
    """One conversation: the hashes of its blocks from the first on, until `until`."""

    user: str
    key: Key
    adapter: str | None
    digests: list[bytes]
    until: float
    has_given_way: bool = False


@dataclass(slots=True)
class _User:
    """Parked conversations of one user: the next to expire first, and how many conversations hold each hash."""

    parked: OrderedDict[Key, RetainedPrefix] = field(default_factory=OrderedDict)
    pins: Counter[bytes] = field(default_factory=Counter)
    ends: dict[bytes, set[Key]] = field(default_factory=dict)  # by the last hash of each


class KVRetention:
    """Holds at most `max_blocks` blocks for `seconds`. `on_pin` and `on_unpin` are called for the first and the last
    conversation that holds a hash."""

    def __init__(
        self,
        max_blocks: int,
        seconds: float,
        on_pin: Callable[[bytes], None],
        on_unpin: Callable[[bytes], None],
    ) -> None:
        self.max_blocks, self.seconds = max_blocks, seconds
        self._on_pin, self._on_unpin = on_pin, on_unpin
        self._users: dict[str, _User] = {}
        self._user_of: dict[Key, str] = {}  # the next to expire first
        self._adapters: Counter[str] = Counter()  # of conversations
        self.num_blocks = 0  # distinct ones; each conversation has at least one
        self.num_hits = self.num_expired = self.num_given_way = 0

    def __len__(self) -> int:
        """The number of parked conversations. Safe from any thread."""
        return len(self._user_of)

    @property
    def is_open(self) -> bool:
        """Return whether parking is enabled."""
        return self.max_blocks > 0 and self.seconds > 0

    def close(self) -> None:
        """Release everything and park nothing from now on."""
        self.max_blocks = 0
        self.clear()

    def is_pinned(self, user: str, digest: bytes) -> bool:
        """Return whether a conversation holds the hash."""
        known = self._users.get(user)
        return known is not None and digest in known.pins

    # -- coming ------------------------------------------------------------------------------------------

    def park(self, user: str, key: Key, adapter: str | None, digests: Sequence[bytes], now: float) -> None:
        """Park these blocks. Conversations of the user that they continue need no entry of their own any more."""
        if not self.is_open or not digests:
            return
        self.drop(key)
        known = self._users.setdefault(user, _User())
        older = self._continued_by(user, digests)
        entry = RetainedPrefix(user, key, adapter, list(digests), now + self.seconds)
        known.parked[key] = entry
        self._user_of[key] = user
        if adapter is not None:
            self._adapters[adapter] += 1
        for digest in digests:
            known.pins[digest] += 1
            if known.pins[digest] == 1:
                self.num_blocks += 1
                self._on_pin(digest)
        known.ends.setdefault(digests[-1], set()).add(key)
        for each in older:
            self.drop(each)
        self._keep_bounds(known)

    def _keep_bounds(self, known: _User) -> None:
        if len(known.parked) > MAX_OF_USER:
            self._note_given_way(next(iter(known.parked.values())))
            self.drop(next(iter(known.parked)))
        elif len(self) > MAX_PARKED:
            biggest = max(self._users.values(), key=lambda each: len(each.parked))
            self._note_given_way(next(iter(biggest.parked.values())))
            self.drop(next(iter(biggest.parked)))
        while self.num_blocks > self.max_blocks:
            self.evict_oldest()

    # -- going -------------------------------------------------------------------------------------------

    def claim(self, user: str, digests: Iterable[bytes], request_id: str = "") -> bool:
        """Note that a request uses these blocks, or continues what another request has parked, which ends that
        parking. Returns whether anything was parked."""
        continued = self._continued_by(user, digests, request_id)
        for key in continued:
            self.drop(key)
        self.num_hits += bool(continued)
        return bool(continued)

    def renew(self, user: str, digests: Iterable[bytes], now: float, request_id: str = "") -> None:
        """Restart the time of blocks from which a waiting request will continue."""
        for key in self._continued_by(user, digests, request_id):
            known = self._users[user]
            known.parked[key].until = now + self.seconds
            known.parked.move_to_end(key)
            self._user_of[key] = self._user_of.pop(key)

    def release(self, request_id: str) -> None:
        """Release the parked outputs of a request; unknown ids are ignored."""
        for key in [key for key in self._user_of if key[0] == request_id]:
            self.drop(key)

    def expire(self, now: float, is_known: Callable[[str], bool] = lambda adapter: True) -> float | None:
        """Release entries that are over by `now` or whose adapter was removed. Returns when the next one is over,
        None if nothing is parked."""
        while self._user_of and self._next.until <= now:
            self.drop(self._next.key)
            self.num_expired += 1
        for adapter in [each for each in self._adapters if not is_known(each)]:
            for key in [each.key for known in self._users.values() for each in known.parked.values()]:
                if self._entry(key).adapter == adapter:
                    self.drop(key)
        return self._next.until if self._user_of else None

    @property
    def _next(self) -> RetainedPrefix:
        """The next to expire."""
        return self._entry(next(iter(self._user_of)))

    def _entry(self, key: Key) -> RetainedPrefix:
        return self._users[self._user_of[key]].parked[key]

    def evict_oldest(self) -> None:
        """Release one block: the last one of the oldest conversation of the user that parks most."""
        if not self._users:
            raise InternalError("a parked block is to be given up although none is parked")
        known = max(self._users.values(), key=lambda each: len(each.pins))
        entry = next(iter(known.parked.values()))
        self._note_given_way(entry)
        self._shorten(known, entry, len(entry.digests) - 1)

    def lose(self, user: str, digest: bytes) -> None:
        """Note that the block of this hash is being rewritten, so that what follows it cannot be used any more."""
        known = self._users.get(user)
        for entry in [] if known is None else list(known.parked.values()):
            assert known is not None
            if digest in entry.digests:
                self._shorten(known, entry, entry.digests.index(digest))

    def drop(self, key: Key) -> None:
        """Release one conversation; unknown keys are ignored."""
        user = self._user_of.get(key)
        if user is not None:
            known = self._users[user]
            self._shorten(known, known.parked[key], 0)

    def clear(self) -> None:
        """Release everything."""
        for key in list(self._user_of):
            self.drop(key)

    def _note_given_way(self, entry: RetainedPrefix) -> None:
        self.num_given_way += not entry.has_given_way
        entry.has_given_way = True

    def _shorten(self, known: _User, entry: RetainedPrefix, length: int) -> None:
        """Keep the first `length` blocks of a conversation; without any it is over."""
        ends = known.ends[entry.digests[-1]]
        ends.discard(entry.key)
        if not ends:
            del known.ends[entry.digests[-1]]
        cut, entry.digests = entry.digests[length:], entry.digests[:length]
        if entry.digests:
            known.ends.setdefault(entry.digests[-1], set()).add(entry.key)
        else:
            del known.parked[entry.key], self._user_of[entry.key]
            self._forget_adapter(entry.adapter)
            if not known.parked:
                del self._users[entry.user]
        for digest in reversed(cut):  # the end is evicted first
            known.pins[digest] -= 1
            if not known.pins[digest]:
                del known.pins[digest]
                self.num_blocks -= 1
                self._on_unpin(digest)

    def _forget_adapter(self, adapter: str | None) -> None:
        if adapter is not None:
            self._adapters[adapter] -= 1
            if not self._adapters[adapter]:
                del self._adapters[adapter]

    # -- looking in --------------------------------------------------------------------------------------

    def digests(self) -> set[bytes]:
        """All hashes that are held, for integrity checks."""
        return {digest for known in self._users.values() for digest in known.pins}

    def check_integrity(self) -> None:
        """Raise `InternalError` unless the counts are those of what is parked."""
        for user, known in self._users.items():
            entries = known.parked.values()
            pins = Counter(digest for entry in entries for digest in entry.digests)
            ends = {(entry.digests[-1], key) for key, entry in known.parked.items()}
            listed = {(digest, key) for digest, keys in known.ends.items() for key in keys}
            is_owned = all(self._user_of.get(key) == user for key in known.parked)
            if pins != known.pins or ends != listed or not is_owned or not entries:
                raise InternalError(f"the parked KV of user {user!r} is counted wrongly")
        num_entries = sum(len(known.parked) for known in self._users.values())
        if num_entries != len(self) or self.num_blocks != len(self.digests()) or self.num_blocks > self.max_blocks:
            raise InternalError(f"{self.num_blocks} blocks are parked, {len(self.digests())} are listed")
        parked = [self._entry(key) for key in self._user_of]
        if Counter(each.adapter for each in parked if each.adapter is not None) != self._adapters:
            raise InternalError(f"the adapters of parked KV are counted as {dict(self._adapters)}")
        if any(one.until > other.until for one, other in pairwise(parked)):
            raise InternalError("parked KV is not in the order in which it expires")

    def _continued_by(self, user: str, digests: Iterable[bytes], request_id: str = "") -> list[Key]:
        """The conversations of a user that end at one of these hashes, or that a request has parked, the oldest
        first."""
        known = self._users.get(user)
        if known is None:
            return []
        keys = {key for digest in digests for key in known.ends.get(digest, ())}
        return [key for key in known.parked if key in keys or key[0] == request_id]
