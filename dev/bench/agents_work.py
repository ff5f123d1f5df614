"""The workload of `bridle bench agents`, for every program that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class AgentWork:
    """The workload: `agents` agents make `calls` calls each, after a context of `context` tokens. A call has `answer`
    tokens, and its result `result` tokens. If the cache is scarce, other users send requests of `other` tokens during
    each call."""

    agents: int
    calls: int
    context: int
    answer: int = 24
    result: int = 32
    other: int = 1_000

    @property
    def total(self) -> int:
        """The number of tokens in an agent's conversation at its end."""
        return self.context + self.calls * (self.answer + self.result) + self.answer


def tokens_of(seed: int, count: int) -> tuple[int, ...]:
    """Return `count` random tokens, always the same ones for the same `seed`."""
    random = Random(seed)
    return tuple(random.randrange(8_000) for _ in range(count))
