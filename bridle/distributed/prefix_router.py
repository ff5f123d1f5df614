"""Chooses the replica for a request: the replica that has computed the prompt's prefix, unless that replica is too
busy.

The router remembers the prompts that it sent to each replica, as chained hashes of their blocks, and forgets the
oldest. The choice is a guess, because replicas evict blocks. A wrong guess only costs one prefill. The router uses no
clock and no I/O. The time of a choice depends on the number of blocks in the prompt, and hardly on the number of
replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

#: The load of a replica that cannot be reached.
AWAY = math.inf
#: The load of a running request in tokens, in addition to the tokens of its prompt that are still to be computed.
RUNNING_TOKENS = 32
#: Number of blocks that are remembered over all replicas: the larger of `MIN_BLOCKS` and `BLOCKS_PER_REPLICA` for each
#: replica. One block takes about 100 bytes.
MIN_BLOCKS, BLOCKS_PER_REPLICA = 1 << 17, 1 << 11
#: A replica with the prefix may have a higher load than the least loaded one: by the prefix, and by this number of
#: tokens, or this factor.
SLACK_TOKENS = 256
_SLACK_FACTOR = 1.5


class PrefixChoice(NamedTuple):
    """The chosen replica, and the number of prompt tokens that are probably in its cache."""

    replica: int
    num_cached: int = 0


class Router(Protocol):
    """Interface for the choice of replicas."""

    def choose(self, prompt: Sequence[int], salt: object, loads: Sequence[float], key: str = "") -> PrefixChoice | None:
        """Return the replica for a prompt; None if no replica is connected. `loads` are the numbers of tokens that the
        replicas have to compute; `AWAY` marks an unreachable replica. Prompts share blocks only if their `salt` is
        equal. If no replica has the prefix, the replica that last got a prompt with the same `key` is preferred."""

    def forget(self, replica: int) -> None:
        """Record that the replica has lost its cache."""


class PrefixRouter:
    """A `Router` for `num_replicas` replicas. `block_size` is the number of tokens in a block of the replicas' KV
    caches, which reuse only whole blocks. At least the latest `max_blocks / 2` sent blocks are remembered."""

    def __init__(self, num_replicas: int, block_size: int, max_blocks: int | None = None) -> None:
        self.num_replicas = num_replicas
        self._block_size = block_size
        self._half = max((max_blocks or max(MIN_BLOCKS, num_replicas * BLOCKS_PER_REPLICA)) // 2, 1)
        # Maps the hash of a chain of blocks to the life of the replica that got it last. There are two dictionaries,
        # and the older one is dropped as a whole. This is smaller and faster than one dictionary in order of use.
        self._recent: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._lives = list(range(num_replicas))  # by replica: its number, plus `num_replicas` per loss
        self._next = 0  # start of the search among equal replicas

    def __len__(self) -> int:
        """Return the number of remembered blocks."""
        return len(self._recent) + len(self._older)

    def choose(self, prompt: Sequence[int], salt: object, loads: Sequence[float], key: str = "") -> PrefixChoice | None:
        """See `Router`."""
        least = min(loads)
        if least == AWAY:
            return None
        chain = chain_of(prompt, salt, self._block_size)
        chosen, num_blocks = self._home(chain)
        name = [hash((salt, key, "key"))] if key else []
        if chosen is None:
            chosen, _ = self._home(name)
        limit = max(least * _SLACK_FACTOR, least + SLACK_TOKENS) + num_blocks * self._block_size
        if chosen is None or loads[chosen] > limit:
            self._next = chosen = first_from(self._next + 1, loads, least)
            _, num_blocks = self._home(chain, chosen)
        self._remember([*name, *chain], chosen)
        return PrefixChoice(chosen, num_blocks * self._block_size)

    def forget(self, replica: int) -> None:
        """See `Router`. Older entries for the replica are ignored, and removed later."""
        self._lives[replica] += self.num_replicas

    def _home(self, chain: list[int], only: int | None = None) -> tuple[int | None, int]:
        """Return the replica that has the longest part of the hash chain, and the number of blocks in that part. If
        `only` is set, only that replica is considered."""
        for num_blocks in range(len(chain), 0, -1):
            value = chain[num_blocks - 1]
            life = self._recent.get(value)
            if life is None:
                life = self._older.get(value)
            if (
                life is not None
                and self._lives[replica := life % self.num_replicas] == life
                and only in (None, replica)
            ):
                return replica, num_blocks
        return only, 0

    def _remember(self, chain: list[int], replica: int) -> None:
        if len(self._recent) + len(chain) > self._half:
            self._recent, self._older = {}, self._recent
        self._recent.update(dict.fromkeys(chain, self._lives[replica]))


def chain_of(prompt: Sequence[int], salt: object, size: int) -> list[int]:
    """Return a hash for each whole block of `size` tokens in a prompt. Each hash also covers all earlier blocks. The
    last token is left out, because it is always computed."""
    value, chain = hash((salt, size)), []
    for start in range(0, (len(prompt) - 1) // size * size, size):
        value = hash((value, tuple(prompt[start : start + size])))
        chain.append(value)
    return chain


def first_from(start: int, loads: Sequence[float], load: float) -> int:
    """Return the next replica with exactly this load, searched cyclically from `start`, so that replicas with equal
    load take turns."""
    start %= len(loads)
    try:
        return loads.index(load, start)
    except ValueError:
        return loads.index(load, 0, start)
