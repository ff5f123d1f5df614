"""Other ways of choosing a replica, for comparison with affinity. Each is a `Router` and knows nothing of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from bridle.distributed.prefix_router import AWAY, PrefixChoice, PrefixRouter, Router, first_from


class RandomRouter:
    """Any replica that is up."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(f"{seed} routing")

    def choose(self, prompt: Sequence[int], salt: object, loads: Sequence[float], key: str = "") -> PrefixChoice | None:
        if min(loads) == AWAY:
            return None
        while loads[number := self._random.randrange(len(loads))] == AWAY:
            pass
        return PrefixChoice(number)

    def forget(self, replica: int) -> None:
        """Do nothing: nothing is remembered of a replica."""


class LeastLoadedRouter:
    """The replica with least to do; equals take turns."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, prompt: Sequence[int], salt: object, loads: Sequence[float], key: str = "") -> PrefixChoice | None:
        least = min(loads)
        if least == AWAY:
            return None
        self._next = first_from(self._next + 1, loads, least)
        return PrefixChoice(self._next)

    def forget(self, replica: int) -> None:
        """Do nothing: nothing is remembered of a replica."""


#: By name: makes a router from the number of replicas and their block size.
POLICIES: dict[str, Callable[[int, int], Router]] = {
    "prefix": PrefixRouter,
    "least loaded": lambda num_replicas, block_size: LeastLoadedRouter(),
    "random": lambda num_replicas, block_size: RandomRouter(),
}
