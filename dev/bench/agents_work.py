"""Work of the agents of `bridle bench agents`, whatever runs them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class AgentWork:
    """Work of the agents: `agents` agents make `calls` calls each, of `answer` tokens, with results of `result`
    tokens, after a context of `context` tokens. Others ask with `other` tokens during each call, if the cache is
    scarce."""

    agents: int
    calls: int
    context: int
    answer: int = 24
    result: int = 32
    other: int = 1_000

    @property
    def total(self) -> int:
        """The tokens of an agent in the end."""
        return self.context + self.calls * (self.answer + self.result) + self.answer


def tokens_of(seed: int, count: int) -> tuple[int, ...]:
    """Return the tokens of text number `seed`: always the same ones."""
    random = Random(seed)
    return tuple(random.randrange(8_000) for _ in range(count))
