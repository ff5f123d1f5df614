"""Other routing policies, for comparison with routing by prefix. Each policy is a `Router` that ignores the prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from bridle.distributed.prefix_router import AWAY, PrefixChoice, PrefixRouter, Router, first_from


class RandomRouter:
    """Chooses a random replica among the connected ones."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(f"{seed} routing")

    def choose(self, prompt: Sequence[int], salt: object, loads: Sequence[float], key: str = "") -> PrefixChoice | None:
        if min(loads) == AWAY:
            return None
        while loads[number := self._random.randrange(len(loads))] == AWAY:
            pass
        return PrefixChoice(number)

    def forget(self, replica: int) -> None:
        """Do nothing, because this policy remembers nothing about replicas."""


class LeastLoadedRouter:
    """Chooses the replica with the lowest load; replicas with equal loads take turns."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, prompt: Sequence[int], salt: object, loads: Sequence[float], key: str = "") -> PrefixChoice | None:
        least = min(loads)
        if least == AWAY:
            return None
        self._next = first_from(self._next + 1, loads, least)
        return PrefixChoice(self._next)

    def forget(self, replica: int) -> None:
        """Do nothing, because this policy remembers nothing about replicas."""


#: Functions that make a router from the number of replicas and their block size, by the name of the policy.
POLICIES: dict[str, Callable[[int, int], Router]] = {
    "prefix": PrefixRouter,
    "least loaded": lambda num_replicas, block_size: LeastLoadedRouter(),
    "random": lambda num_replicas, block_size: RandomRouter(),
}
