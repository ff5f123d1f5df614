"""Prompts whose KV clients retain by name. Clients create, prefetch and delete prompt caches, and each prompt cache
expires after its lifetime.

A prompt cache is an entry of the engine's `KVRetention`, with a name that only its user knows. The tokens of the prompt
are stored with its prompt cache. If the KV of a prompt is lost, it can be computed again from the stored tokens. Users
see their own prompt caches, and those that other users share with their group. If a prompt cache is shared, its blocks
are in a hash chain of the group. A prompt uses the blocks of a shared prompt cache only if it begins with all of them.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

import msgspec

from bridle.config import EngineConfig
from bridle.engine.factory import max_retained_blocks
from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.request import SharedPrefix
from bridle.errors import InvalidRequest, Overloaded, UnknownCache
from bridle.safe_repr import short_repr
from bridle.serving.state_db import StateTable
from bridle.serving.tenancy.keys import Identity

#: Maximum and default lifetime of a cache in seconds.
MAX_TTL, DEFAULT_TTL = 86_400.0, 3_600.0
#: Maximum number of caches of all users.
MAX_CACHES = 4_096
_UNITS = {"s": 1.0, "m": 60.0, "h": 3_600.0}


@dataclass(slots=True)
class PromptCache:
    """A retained prompt of a user: its model and adapter, its tokens, and its lifetime of `ttl` seconds, which ends at
    `until`. `created` and `until` are Unix times. If `group` is not empty, the prompt cache is shared with that
    group."""

    user: str
    model: str
    adapter: str | None
    tokens: array[int]
    ttl: float
    id: str
    created: float
    until: float
    group: str = ""

    def is_shared_with(self, identity: Identity) -> bool:
        """Return whether this user sees the prompt cache because it is shared with the user's group."""
        return bool(self.group) and self.group == identity.group

    def fields(self, user: str) -> dict[str, Any]:
        """Return the prompt cache in the form that its users see."""
        return {
            "id": self.id,
            "object": "cache",
            "model": self.adapter or self.model,
            "created_at": int(self.created),
            "expires_at": int(self.until),
            "ttl": self.ttl,
            "tokens": len(self.tokens),
            "shared": bool(self.group),
            "owned": user == self.user,
        }


@dataclass(frozen=True, slots=True)
class _SavedCache:
    """A prompt cache in the form in which it is saved. `tokens` are 64-bit integers in this machine's byte order."""

    user: str
    model: str
    adapter: str | None
    tokens: bytes
    ttl: float
    id: str
    created: float
    until: float
    group: str = ""


class PromptCaches:
    """All prompt caches of a server. With a state `table`, the store also has the prompt caches that were saved there.
    Only one thread may use the store."""

    def __init__(self, clock: Callable[[], float] = time.time, table: StateTable | None = None) -> None:
        self._clock, self._table = clock, table
        self._caches: dict[str, PromptCache] = {}
        for row in () if table is None else table.rows():
            saved = msgspec.msgpack.decode(row.value, type=_SavedCache)
            self._caches[row.name] = PromptCache(**{**asdict(saved), "tokens": array("q", saved.tokens)})

    def add(
        self,
        user: str,
        model: str,
        adapter: str | None,
        tokens: Iterable[int],
        ttl: float,
        limits: CacheLimits,
        group: str = "",
    ) -> PromptCache:
        """Register a prompt cache. The caller must then compute the KV of the prompt. If `group` is not empty, the
        prompt cache is shared with that group. Raises an `InvalidRequest` that names the exceeded limit."""
        own, now = self.of_user(user), self._clock()
        made = PromptCache(
            user, model, adapter, array("q", tokens), ttl, f"cache_{secrets.token_hex(12)}", now, now + ttl, group
        )
        limits.check([each for each in own if each.model == model], made)
        if len(self._caches) >= MAX_CACHES:
            raise Overloaded(f"the server has {len(self._caches)} prompt caches of all users; at most {MAX_CACHES}")
        self._caches[made.id] = made
        self._save(made)
        return made

    def renew(self, cache: PromptCache) -> None:
        """Restart the lifetime of a prompt cache."""
        cache.until = self._clock() + cache.ttl
        self._save(cache)

    def _save(self, cache: PromptCache) -> None:
        if self._table is not None:
            fields = {each.name: getattr(cache, each.name) for each in dataclass_fields(cache)}
            value = msgspec.msgpack.encode(_SavedCache(**{**fields, "tokens": cache.tokens.tobytes()}))
            self._table.put(cache.user, cache.id, cache.ttl, value)

    def _live(self) -> list[PromptCache]:
        now = self._clock()
        for over in [each.id for each in self._caches.values() if each.until <= now]:
            self.drop(self._caches[over])
        return list(self._caches.values())

    def of_user(self, user: str) -> list[PromptCache]:
        """Return the prompt caches of a user, the oldest first."""
        return [each for each in self._live() if each.user == user]

    def visible_to(self, identity: Identity) -> list[PromptCache]:
        """Return the prompt caches of a user and those that others share with the user's group, the oldest first."""
        return [each for each in self._live() if each.user == identity.user or each.is_shared_with(identity)]

    def find(self, identity: Identity, name: str) -> PromptCache:
        """Return a prompt cache that a user may see. Raises `UnknownCache`."""
        found = next((each for each in self.visible_to(identity) if each.id == name), None)
        if found is None:
            raise UnknownCache(
                f"this user has no prompt cache {short_repr(name)}; it may have expired. Create it again"
            )
        return found

    def shared_prefix(
        self, identity: Identity, model: str, adapter: str | None, tokens: Sequence[int], block_size: int
    ) -> SharedPrefix | None:
        """Return the longest prompt cache of the user's group whose full blocks begin the prompt, or None. Tokens after
        the last full block may differ, because a longer text is often tokenized differently at its end."""
        prompt = memoryview(array("q", tokens))
        shared = [
            (len(each.tokens) // block_size * block_size, each)
            for each in self._live()
            if each.is_shared_with(identity) and (each.model, each.adapter) == (model, adapter)
        ]
        fitting = [(end, each) for end, each in shared if prompt[:end] == memoryview(each.tokens)[:end]]
        end, found = max(fitting, key=lambda one: one[0], default=(0, None))
        return None if found is None else SharedPrefix(found.group, found.user, end)

    def drop(self, cache: PromptCache) -> None:
        """Delete a cache."""
        self._caches.pop(cache.id, None)
        if self._table is not None:
            self._table.drop(cache.user, cache.id)


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Limits of one user for one model: the number of prompts, and the number of tokens in them."""

    max_retained: int
    max_tokens: int
    block_size: int

    @staticmethod
    def of(info: ExecutorInfo, config: EngineConfig) -> CacheLimits:
        """Return the limits for prompt caches that an engine sets. If the engine retains no KV or has no prefix cache,
        the limits are 0."""
        is_on = config.enable_prefix_caching and info.kv == "paged"
        blocks = max_retained_blocks(info, config) if is_on else 0
        return CacheLimits(config.max_retained, blocks * info.block_size, info.block_size)

    def check(self, others: list[PromptCache], cache: PromptCache) -> None:
        """Raise `InvalidRequest` if a user who has the prompt caches `others` has no room for `cache`."""
        taken, wanted = sum(self._size(each) for each in others), self._size(cache)
        if not wanted:
            raise InvalidRequest(
                f"prompt: got {len(cache.tokens)} tokens; a prompt cache needs at least {self.block_size}, one KV "
                "block",
                "prompt",
            )
        if len(others) >= self.max_retained:
            raise InvalidRequest(
                f"caches: this user has {len(others)} prompt caches; at most {self.max_retained} (max_retained). "
                "Delete one, or wait until one expires",
                "caches",
            )
        if taken + wanted > self.max_tokens:
            raise InvalidRequest(
                f"prompt: got {wanted} tokens to retain, and this user's prompt caches have {taken}; at most "
                f"{self.max_tokens} in all (max_retained_tokens). Delete a cache, or send a shorter prompt",
                "prompt",
            )

    def _size(self, cache: PromptCache) -> int:
        return len(cache.tokens) // self.block_size * self.block_size


def read_ttl(given: object) -> float:
    """Return a lifetime in seconds. The value is a number, or a text such as `90s`, `5m` or `24h`. Raises
    `InvalidRequest`."""
    seconds: object = given
    if isinstance(given, str) and given[-1:] in _UNITS and given[:-1].isascii() and given[:-1].isdigit():
        seconds = int(given[:9].rstrip("smh")) * _UNITS[given[-1]]
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 1 <= float(seconds) <= MAX_TTL:  # type: ignore[arg-type]
        raise InvalidRequest(
            f"ttl: got {short_repr(given)}; it must be between 1 and {MAX_TTL:g} seconds, or a text such as '5m'", "ttl"
        )
    return float(seconds)  # type: ignore[arg-type]
