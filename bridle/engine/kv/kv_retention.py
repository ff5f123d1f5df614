"""KV that is retained (parked) for a while: its blocks are protected from eviction, because they will be used again
soon.

A client that receives a tool call sends the tool's result later. The client's next prompt begins with all tokens that
were computed so far. Until the next prompt arrives, the blocks are free, so running requests can always use them.
Retained blocks are evicted after all other free blocks. A retained conversation is stored as a list of block hashes.
Retention ends when a request continues the conversation, when its time ends, when its client releases it, or when other
requests need the blocks. When other requests need blocks, the user with the most retained blocks loses some, from the
end of that user's oldest conversation.

A client can also ask for a prefix to be retained. The entry of a prefix that a client asked to retain *stays*: it is
kept after a request continues the prefix. A request that continues a retained prefix only restarts its time, unless the
entry has a name. Each user has a limit on retained entries and on their blocks. Beyond a limit, the entry that expires
first is removed.

This module uses hashes, users and times, but no blocks. Users share no hashes, except for prefixes that one user shares
with a group.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from bridle.engine.request import NAMED, Retention
from bridle.errors import InternalError

#: Maximum number of parked conversations: of one user, and of all users together.
MAX_OF_USER, MAX_PARKED = 256, 4_096
#: Maximum number of prefixes that a user retains on request.
MAX_RETAINED = 64

#: Key of an entry: (request, number of its output), (name of a retained prefix, `NAMED`), or (user, last hash).
Key = tuple[str, int | bytes]


@dataclass(slots=True)
class RetainedPrefix:
    """One retained conversation: the hashes of its blocks, which are kept until the time `until`. Each use of the
    blocks restarts this period of `seconds` seconds."""

    user: str
    key: Key
    adapter: str | None
    digests: list[bytes]
    until: float
    seconds: float
    has_given_way: bool = False

    @property
    def stays(self) -> bool:
        """Return whether a client asked for the entry. An entry that a client asked for stays after a request continues
        it."""
        return self.is_named or isinstance(self.key[1], bytes)

    @property
    def is_named(self) -> bool:
        """Return whether the entry has a name. The client releases a named entry by its name, and use does not prolong
        the entry."""
        return self.key[1] == NAMED


@dataclass(slots=True)
class _User:
    """Entries of one user, the least recently used first, with the number of entries that contain each hash. `asked`
    counts only hashes in entries that a client asked for."""

    parked: OrderedDict[Key, RetainedPrefix] = field(default_factory=OrderedDict)
    pins: Counter[bytes] = field(default_factory=Counter)
    asked: Counter[bytes] = field(default_factory=Counter)
    ends: dict[bytes, set[Key]] = field(default_factory=dict)  # keys of the entries that end with a hash


class KVRetention:
    """Protects at most `max_blocks` blocks for `seconds`. `on_pin` is called for the first conversation that contains a
    hash, `on_unpin` for the last one. At the request of clients, a user may retain `max_retained` prefixes with
    `max_asked_blocks` blocks (None: unlimited)."""

    def __init__(
        self,
        max_blocks: int,
        seconds: float,
        on_pin: Callable[[bytes], None],
        on_unpin: Callable[[bytes], None],
        max_retained: int = MAX_RETAINED,
        max_asked_blocks: int | None = None,
    ) -> None:
        self.max_blocks, self.seconds = max_blocks, seconds
        self._on_pin, self._on_unpin = on_pin, on_unpin
        self.users: dict[str, _User] = {}
        self._max_retained = max_retained
        self._max_asked_blocks = max_blocks if max_asked_blocks is None else max_asked_blocks
        self._user_of: dict[Key, str] = {}
        self._soonest = inf  # no entry expires before this time
        self._adapters: Counter[str] = Counter()  # number of conversations by adapter
        self._pins: Counter[bytes] = Counter()  # users that hold each hash; each conversation has at least one
        self.num_hits = self.num_expired = self.num_given_way = 0

    def __len__(self) -> int:
        """Return the number of retained conversations. Safe from any thread."""
        return len(self._user_of)

    @property
    def num_blocks(self) -> int:
        """Return the number of different protected blocks. Safe from any thread."""
        return len(self._pins)

    @property
    def is_open(self) -> bool:
        """Return whether blocks may be retained at all."""
        return self.max_blocks > 0

    @property
    def num_retained(self) -> int:
        """Return the number of entries that clients asked for. Safe from any thread."""
        return sum(isinstance(mark, bytes) or mark == NAMED for _, mark in list(self._user_of))

    def close(self) -> None:
        """Release all entries, and retain nothing from now on."""
        self.max_blocks = 0
        self.clear()

    # -- adding entries ----------------------------------------------------------------------------------

    def park(self, user: str, key: Key, adapter: str | None, digests: Sequence[bytes], now: float) -> None:
        """Park these blocks. Earlier entries of the user that `digests` continue are dropped."""
        if self.seconds > 0:
            self._add(RetainedPrefix(user, key, adapter, list(digests), now + self.seconds, self.seconds))

    def retain(self, user: str, adapter: str | None, digests: Sequence[bytes], wish: Retention, now: float) -> int:
        """Retain the blocks with the hashes `digests` at the request of a client. Returns the number of retained
        blocks, which the limits of the user may reduce."""
        if not digests or not self._max_retained:
            return 0
        key: Key = (wish.name, NAMED) if wish.name else (user, digests[-1])
        until = now + wish.seconds
        if not wish.name and key in self._user_of:
            until = max(until, self._entry(key).until)
        entry = RetainedPrefix(user, key, adapter, list(digests), until, wish.seconds)
        self._add(entry)
        return len(entry.digests) if key in self._user_of else 0

    def _add(self, entry: RetainedPrefix) -> None:
        user, key, digests, adapter = entry.user, entry.key, entry.digests, entry.adapter
        if not self.is_open or not digests:
            return
        self.drop(key)
        known = self.users.setdefault(user, _User())
        older = [each for each in self._continued_by(user, digests) if _replaces(entry, known.parked[each])]
        known.parked[key] = entry
        self._soonest = min(self._soonest, entry.until)
        self._user_of[key] = user
        if adapter is not None:
            self._adapters[adapter] += 1
        for digest in digests:
            known.pins[digest] += 1
            if known.pins[digest] == 1:
                self._pins[digest] += 1
                if self._pins[digest] == 1:
                    self._on_pin(digest)
        if entry.stays:
            known.asked.update(digests)
        known.ends.setdefault(digests[-1], set()).add(key)
        for each in older:
            self.drop(each)
        self._keep_bounds(known)

    def _keep_bounds(self, known: _User) -> None:
        if sum(entry.stays for entry in known.parked.values()) > self._max_retained:
            self._give_way(_first(known, stays=True))
        while (excess := len(known.asked) - self._max_asked_blocks) > 0:
            self._cut(known, _first(known, stays=True), excess)
        if len(known.parked) > MAX_OF_USER:
            self._give_way(_first(known))
        elif len(self) > MAX_PARKED:
            self._give_way(_first(max(self.users.values(), key=lambda each: len(each.parked))))
        while self.num_blocks > self.max_blocks:
            self.evict_oldest()

    def _give_way(self, entry: RetainedPrefix) -> None:
        self._note_given_way(entry)
        self.drop(entry.key)

    # -- using and releasing entries ---------------------------------------------------------------------

    def claim(self, user: str, digests: Iterable[bytes], request_id: str = "") -> bool:
        """Record that a request uses the blocks with the hashes `digests`, or continues the retained conversation of
        another request. The retention of the continued conversation ends. Returns whether any blocks were retained."""
        continued = self._continued_by(user, digests, request_id)
        for key in continued:
            if not self._entry(key).stays:
                self.drop(key)
        self.num_hits += bool(continued)
        return bool(continued)

    def renew(self, user: str, digests: Iterable[bytes], now: float, request_id: str = "") -> None:
        """Restart the time of retained blocks that a waiting request will reuse."""
        for key in self._continued_by(user, digests, request_id):
            known = self.users[user]
            entry = known.parked[key]
            known.parked.move_to_end(key)
            if not entry.is_named:
                entry.until = max(entry.until, now + entry.seconds)

    def release(self, request_id: str) -> None:
        """Release the retained KV of a request's outputs, or a prefix that was retained under a name. Unknown ids and
        names are ignored."""
        for key in [key for key in self._user_of if key[0] == request_id and not isinstance(key[1], bytes)]:
            self.drop(key)

    def expire(self, now: float, is_known: Callable[[str], bool] = lambda adapter: True) -> float | None:
        """Release the entries that expired before `now`, or whose adapter was removed. Returns the time at which the
        next entry expires, or None if there is no entry."""
        if now >= self._soonest:
            entries = [self._entry(key) for key in self._user_of]
            for entry in entries:
                if entry.until <= now:
                    self.drop(entry.key)
                    self.num_expired += 1
            self._soonest = min((entry.until for entry in entries if entry.until > now), default=inf)
        for adapter in [each for each in self._adapters if not is_known(each)]:
            for key in [each.key for known in self.users.values() for each in known.parked.values()]:
                if self._entry(key).adapter == adapter:
                    self.drop(key)
        return self._soonest if self._user_of else None

    def _entry(self, key: Key) -> RetainedPrefix:
        return self.users[self._user_of[key]].parked[key]

    def evict_oldest(self) -> None:
        """Release one block: the last block of the oldest conversation of the user with the most retained blocks."""
        if not self.users:
            raise InternalError("a retained KV block must be released, but no block is retained")
        known = max(self.users.values(), key=lambda each: len(each.pins))
        self._cut(known, _first(known), 1)

    def _cut(self, known: _User, entry: RetainedPrefix, num_blocks: int) -> None:
        """Release the last blocks of a conversation."""
        self._note_given_way(entry)
        self._shorten(known, entry, max(len(entry.digests) - num_blocks, 0))

    def lose(self, digest: bytes) -> None:
        """Record that the block with this hash is being rewritten. In every conversation, the blocks after this block
        are released, because they cannot be used any more."""
        for known in [each for each in self.users.values() if digest in each.pins]:
            for entry in [each for each in known.parked.values() if digest in each.digests]:
                self._shorten(known, entry, entry.digests.index(digest))

    def drop(self, key: Key) -> None:
        """Release the conversation with this key; unknown keys are ignored."""
        user = self._user_of.get(key)
        if user is not None:
            known = self.users[user]
            self._shorten(known, known.parked[key], 0)

    def clear(self) -> None:
        """Release all conversations."""
        for key in list(self._user_of):
            self.drop(key)

    def _note_given_way(self, entry: RetainedPrefix) -> None:
        self.num_given_way += not entry.has_given_way
        entry.has_given_way = True

    def _shorten(self, known: _User, entry: RetainedPrefix, length: int) -> None:
        """Keep the first `length` blocks of a conversation. A conversation without blocks is dropped."""
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
                del self.users[entry.user]
        for digest in cut if entry.stays else ():
            known.asked[digest] -= 1
            if not known.asked[digest]:
                del known.asked[digest]
        for digest in reversed(cut):  # released last to first, so that the end is evicted first
            known.pins[digest] -= 1
            if not known.pins[digest]:
                del known.pins[digest]
                self._pins[digest] -= 1
                if not self._pins[digest]:
                    del self._pins[digest]
                    self._on_unpin(digest)

    def _forget_adapter(self, adapter: str | None) -> None:
        if adapter is not None:
            self._adapters[adapter] -= 1
            if not self._adapters[adapter]:
                del self._adapters[adapter]

    # -- checks ------------------------------------------------------------------------------------------

    def digests(self) -> set[bytes]:
        """Return all protected hashes, for integrity checks."""
        return set(self._pins)

    def check_integrity(self) -> None:
        """Raise `InternalError` if the counts do not match the retained entries."""
        for user, known in self.users.items():
            entries = known.parked.values()
            pins = Counter(digest for entry in entries for digest in entry.digests)
            asked = Counter(digest for entry in entries if entry.stays for digest in entry.digests)
            ends = {(entry.digests[-1], key) for key, entry in known.parked.items()}
            listed = {(digest, key) for digest, keys in known.ends.items() for key in keys}
            is_owned = all(self._user_of.get(key) == user for key in known.parked)
            if pins != known.pins or asked != known.asked or ends != listed or not is_owned or not entries:
                raise InternalError(f"the counts of retained KV blocks of user {user!r} are wrong")
        num_entries = sum(len(known.parked) for known in self.users.values())
        held = Counter(digest for known in self.users.values() for digest in known.pins)
        if num_entries != len(self) or self._pins != held or self.num_blocks > self.max_blocks:
            raise InternalError(
                f"the counts of retained KV blocks disagree: {self.num_blocks} are counted, {len(self.digests())} "
                "are listed"
            )
        parked = [self._entry(key) for key in self._user_of]
        if Counter(each.adapter for each in parked if each.adapter is not None) != self._adapters:
            raise InternalError(
                f"the counts of retained conversations for each adapter are wrong: {dict(self._adapters)}"
            )
        if any(entry.until < self._soonest for entry in parked):
            raise InternalError("some retained KV expires before the recorded time of the next expiry")

    def _continued_by(self, user: str, digests: Iterable[bytes], request_id: str = "") -> list[Key]:
        """Return the user's conversations that end with one of `digests` or that the request has retained, the oldest
        first."""
        known = self.users.get(user)
        if known is None:
            return []
        keys = {key for digest in digests for key in known.ends.get(digest, ())}
        return [key for key, each in known.parked.items() if key in keys or (key[0] == request_id and not each.stays)]


def _first(known: _User, stays: bool = False) -> RetainedPrefix:
    """Return the user's entry that expires first. With `stays`, only entries that a client asked for are considered."""
    return min((each for each in known.parked.values() if each.stays or not stays), key=lambda each: each.until)


def _replaces(entry: RetainedPrefix, older: RetainedPrefix) -> bool:
    """Return whether `older` is not needed any more, because `entry` continues it."""
    return not older.stays or (entry.stays and not older.is_named and older.until <= entry.until)
