"""Duration of an engine step: a sum of costs of the step plan's content, fitted to measured steps.

A decoding step reads all weights once. It also has a cost for each token, for each sequence (sampling, scheduling,
events), and for each position of context. With few tokens, reading the weights dominates the duration; with many
tokens, computing the tokens does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations

from bridle.engine.scheduling.step_plan import StepPlan
from bridle.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class StepSize:
    """Size of a step plan: its rows, their tokens, and the positions to which all rows attend at the end."""

    rows: int
    tokens: int
    context: int

    @classmethod
    def of(cls, plan: StepPlan) -> StepSize:
        tokens = context = 0
        for row in plan.rows:
            tokens += row.num_scheduled
            context += row.start + row.num_scheduled
        return cls(len(plan.rows), tokens, context)


@dataclass(frozen=True, slots=True)
class SimulatedStepCost:
    """Seconds of a step: `base`, plus an amount for each row, token and position of context."""

    base: float
    row: float
    token: float
    context: float

    def seconds(self, rows: float, tokens: float, context: float) -> float:
        """Return the seconds of a step."""
        return self.base + self.row * rows + self.token * tokens + self.context * context

    def error(self, steps: Iterable[tuple[StepSize, float]]) -> float:
        """Return the mean deviation from measured steps, as a share of their time."""
        ratios = [abs(self.seconds(*astuple(size)) / seconds - 1) for size, seconds in steps]
        return sum(ratios) / len(ratios)


def fit(steps: Sequence[tuple[StepSize, float]]) -> SimulatedStepCost:
    """Return the cost that minimizes the squares of the relative errors over `steps`. No coefficient of the cost is
    negative.

    With four coefficients it is simplest to try all subsets of them.
    """
    import numpy as np

    if not steps:
        raise InvalidRequest("0 steps were measured; at least 1 is needed to fit what one costs", "steps")
    seconds = np.array([taken for _, taken in steps])  # [n]
    sizes = np.array([(1, size.rows, size.tokens, size.context) for size, _ in steps]) / seconds[:, None]  # [n, 4]
    best, least = np.zeros(4), float("inf")
    for count in range(1, 5):
        for used in map(list, combinations(range(4), count)):
            parts = np.linalg.lstsq(sizes[:, used], np.ones(len(steps)), rcond=None)[0]  # [count]
            squares = float(np.sum((sizes[:, used] @ parts - 1) ** 2))
            if parts.min() >= 0 and squares < least:
                least, best = squares, np.zeros(4)
                best[used] = parts
    return SimulatedStepCost(*(float(part) for part in best))
