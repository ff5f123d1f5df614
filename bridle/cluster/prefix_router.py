"""Which replica takes a request: the one that has computed its beginning already, unless it has too much to do.

The router remembers which replica was sent which prompts, as chained hashes of their blocks, and forgets the oldest. It
is a guess (a replica evicts when it must), which costs a prefill when it is wrong and nothing else. No clock, no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

#: Blocks that are remembered, over all replicas.
MAX_BLOCKS = 1 << 17
#: A replica with the prefix may be ahead of the least loaded one by so many tokens, and by this factor.
_SLACK_TOKENS = 1024
_SLACK_FACTOR = 1.5


class PrefixRouter:
    """Chooses among `num_replicas`. `block_size` is that of their KV caches: nothing shorter is ever shared."""

    def __init__(self, num_replicas: int, block_size: int, max_blocks: int = MAX_BLOCKS) -> None:
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._homes: OrderedDict[int, int] = OrderedDict()  # hash of a chain of blocks: the replica that has it last
        self._next = 0  # where to begin among equals

        self.num_replicas = num_replicas

    def choose(self, prompt: Sequence[int], salt: object, loads: Sequence[float | None]) -> int | None:
        """The replica for a prompt; None if none is up. `loads` are tokens waiting or running, None for a replica that
        is away; prompts share blocks only under an equal `salt`."""
        up = [number for number, load in enumerate(loads) if load is not None]
        if not up:
            return None
        chain = self._chain(prompt, salt)
        chosen = self._with_prefix(chain, loads)
        if chosen is None:
            chosen = self._least_loaded(up, loads)
        self._remember(chain, chosen)
        return chosen

    def forget(self, replica: int) -> None:
        """The replica has lost its cache."""
        for key in [key for key, home in self._homes.items() if home == replica]:
            del self._homes[key]

    def _chain(self, prompt: Sequence[int], salt: object) -> list[int]:
        """Hashes of the prompt's whole blocks, each with all before it. The last token is always computed."""
        size, value, chain = self._block_size, hash((salt, self._block_size)), []
        for start in range(0, (len(prompt) - 1) // size * size, size):
            value = hash((value, tuple(prompt[start : start + size])))
            chain.append(value)
        return chain

    def _with_prefix(self, chain: list[int], loads: Sequence[float | None]) -> int | None:
        """The replica that has most of the chain, unless it is too busy."""
        for value in reversed(chain):
            home = self._homes.get(value)
            load = None if home is None else loads[home]
            if load is None:
                continue
            least = min(each for each in loads if each is not None)
            return home if load <= max(least * _SLACK_FACTOR, least + _SLACK_TOKENS) else None
        return None

    def _least_loaded(self, up: list[int], loads: Sequence[float | None]) -> int:
        """Equals take turns."""
        self._next += 1
        return min(up, key=lambda number: (loads[number], (number - self._next) % self.num_replicas))

    def _remember(self, chain: list[int], replica: int) -> None:
        for value in chain:
            self._homes[value] = replica
            self._homes.move_to_end(value)
        while len(self._homes) > self._max_blocks:
            self._homes.popitem(last=False)
