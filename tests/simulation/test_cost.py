"""Steps that were measured give their cost back."""

from __future__ import annotations

from random import Random

import pytest

from bridle.engine.scheduling.step_plan import PlanRow, StepPlan
from bridle.errors import InvalidRequest
from dev.simulation.cost import SimulatedStepCost, StepSize, fit


def some_steps(cost: SimulatedStepCost, noise: float = 0.0) -> list[tuple[StepSize, float]]:
    random = Random(0)
    steps = []
    for _ in range(60):
        rows = random.randrange(1, 60)
        size = StepSize(rows, rows + random.choice((0, 0, 200, 500)), rows * random.randrange(50, 1_000))
        seconds = cost.seconds(size.rows, size.tokens, size.context)
        steps.append((size, seconds * (1 + noise * random.uniform(-1, 1))))
    return steps


def test_a_plan_is_measured_by_what_it_computes() -> None:
    plan = StepPlan(1, [PlanRow(0, start=10, num_scheduled=1), PlanRow(1, start=0, num_scheduled=30)])
    assert StepSize.of(plan) == StepSize(rows=2, tokens=31, context=41)


@pytest.mark.parametrize("cost", [SimulatedStepCost(0.01, 2e-4, 1e-4, 1e-7), SimulatedStepCost(0.02, 0.0, 1e-4, 0.0)])
def test_the_cost_is_found_again(cost: SimulatedStepCost) -> None:
    found = fit(some_steps(cost))
    for name in SimulatedStepCost.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(cost, name), rel=1e-6, abs=1e-12)
    assert found.error(some_steps(cost)) < 1e-9


def test_no_part_is_negative_whatever_was_measured() -> None:
    steps = [(StepSize(rows, rows, 100 * rows), 1.0 / rows) for rows in range(1, 20)]
    assert min(getattr(fit(steps), name) for name in SimulatedStepCost.__slots__) >= 0
    noisy = fit(some_steps(SimulatedStepCost(0.01, 2e-4, 1e-4, 1e-7), noise=0.2))
    assert noisy.base == pytest.approx(0.01, rel=0.5)
    with pytest.raises(InvalidRequest, match="0 steps were measured"):
        fit([])
