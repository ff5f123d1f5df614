"""Work of the agents of `bridle bench agents`, for every program that runs them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class AgentWork:
    """Work of the agents: `agents` agents make `calls` calls each, of `answer` tokens, with results of `result` tokens,
    after a context of `context` tokens. If the cache is scarce, other users send requests of `other` tokens during each
    call."""

    agents: int
    calls: int
    context: int
    answer: int = 24
    result: int = 32
    other: int = 1_000

    @property
    def total(self) -> int:
        """Return the number of tokens of an agent at the end."""
        return self.context + self.calls * (self.answer + self.result) + self.answer


def tokens_of(seed: int, count: int) -> tuple[int, ...]:
    """Return the tokens of text number `seed`, the same in each call."""
    random = Random(seed)
    return tuple(random.randrange(8_000) for _ in range(count))
