"""Which replica takes a request: the one that has computed its beginning already, unless it has too much to do.

The router remembers which replica was sent which prompts, as chained hashes of their blocks, and forgets the oldest. It
is a guess (a replica evicts when it must), which costs a prefill when it is wrong and nothing else. No clock, no I/O.
What it does for a request takes time for each of the prompt's blocks, and next to none for each replica.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

#: The load of a replica that is away.
AWAY = math.inf
#: Blocks that are remembered, over all replicas: so many at least, and so many for each. One takes about 100 bytes.
MIN_BLOCKS, BLOCKS_PER_REPLICA = 1 << 17, 1 << 11
#: A replica with the prefix may be ahead of the least loaded one by the prefix, and by so many tokens, or this factor.
_SLACK_TOKENS = 256
_SLACK_FACTOR = 1.5


class Choice(NamedTuple):
    """A replica, and how many of the prompt's tokens are in its cache already, as far as is known."""

    replica: int
    num_cached: int = 0


class Router(Protocol):
    """Chooses replicas."""

    def choose(self, prompt: Sequence[int], salt: object, loads: Sequence[float]) -> Choice | None:
        """The replica for a prompt; None if none is up. `loads` are tokens to be computed, `AWAY` for a replica that is
        not there; prompts share blocks only under an equal `salt`."""
        raise NotImplementedError

    def forget(self, replica: int) -> None:
        """The replica has lost its cache."""


class PrefixRouter:
    """A `Router` among `num_replicas`. `block_size` is that of their KV caches: nothing shorter is ever shared. Of the
    blocks that were sent somewhere the latest are remembered: half of `max_blocks` at least."""

    def __init__(self, num_replicas: int, block_size: int, max_blocks: int | None = None) -> None:
        self.num_replicas = num_replicas
        self._block_size = block_size
        self._half = max((max_blocks or max(MIN_BLOCKS, num_replicas * BLOCKS_PER_REPLICA)) // 2, 1)
        # Hash of a chain of blocks: the life of the replica that was sent it last. Two dictionaries, of which the older
        # is dropped whole, are smaller than one in order of use, and faster.
        self._recent: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._lives = list(range(num_replicas))  # by replica: its number, and `num_replicas` more for each loss
        self._next = 0  # where to begin among equals

    def __len__(self) -> int:
        """Blocks that are remembered."""
        return len(self._recent) + len(self._older)

    def choose(self, prompt: Sequence[int], salt: object, loads: Sequence[float]) -> Choice | None:
        """See `Router`."""
        least = min(loads)
        if least == AWAY:
            return None
        chain = self._chain(prompt, salt)
        chosen, num_blocks = self._home(chain)
        limit = max(least * _SLACK_FACTOR, least + _SLACK_TOKENS) + num_blocks * self._block_size
        if chosen is None or loads[chosen] > limit:
            self._next = chosen = first_from(self._next + 1, loads, least)
            _, num_blocks = self._home(chain, chosen)
        self._remember(chain, chosen)
        return Choice(chosen, num_blocks * self._block_size)

    def forget(self, replica: int) -> None:
        """See `Router`. What it was sent in its last life is passed over from now on, and goes with time."""
        self._lives[replica] += self.num_replicas

    def _chain(self, prompt: Sequence[int], salt: object) -> list[int]:
        """Hashes of the prompt's whole blocks, each with all before it. The last token is always computed."""
        size, value, chain = self._block_size, hash((salt, self._block_size)), []
        for start in range(0, (len(prompt) - 1) // size * size, size):
            value = hash((value, tuple(prompt[start : start + size])))
            chain.append(value)
        return chain

    def _home(self, chain: list[int], only: int | None = None) -> tuple[int | None, int]:
        """The replica that has most of the chain, and how many blocks of it; with `only`, how many that one has."""
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


def first_from(start: int, loads: Sequence[float], load: float) -> int:
    """The first replica with that load, counted from `start` and around: equals take turns."""
    start %= len(loads)
    try:
        return loads.index(load, start)
    except ValueError:
        return loads.index(load, 0, start)
