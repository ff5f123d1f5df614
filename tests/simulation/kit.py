"""Small scenarios, and an executor that checks every plan of a simulated engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.scheduling.step_plan import SampleBatch, StepPlan, StepResult
from bridle.testing.scripted import ScriptedExecutor
from dev.simulation import Lengths, Scenario, SimulatedStepCost, Timing, Workload
from dev.simulation.engine_core import CountingExecutor
from dev.simulation.timeline import LocalClock

COST = SimulatedStepCost(base=0.010, row=2e-4, token=1e-4, context=1e-7)


def make_scenario(num_requests: int = 200, num_replicas: int = 3, rate: float = 12.0, **fields: Any) -> Scenario:
    """Return a scenario with short chats on few replicas. `fields` replace fields of the workload or the scenario."""
    workload = Workload(
        num_requests,
        rate,
        num_systems=12,
        think_seconds=3.0,
        system_tokens=Lengths(120, 1.5, 32, 400),
        document_tokens=Lengths(500, 1.3, 200, 800),
        output_tokens=Lengths(20, 2.0, 1, 80),
        max_model_len=2_048,
    )
    names = set(Workload.__dataclass_fields__) & set(fields)
    workload = replace(workload, **{name: fields.pop(name) for name in names})
    fields.setdefault("timing", Timing(restart=2.0))
    return Scenario(workload, num_replicas, COST, **fields)


class CheckedExecutor(CountingExecutor):
    """An executor that passes each plan to a `ScriptedExecutor`, which raises an error for an invalid plan."""

    def __init__(self, info: ExecutorInfo, cost: SimulatedStepCost, clock: LocalClock) -> None:
        super().__init__(info, cost, clock)
        self.scripted = ScriptedExecutor(2, info.num_blocks, info.block_size, next_token=lambda prefix: 0)
        self.scripted._mirrors.info = info  # its own vocabulary stays small: it makes a row of logits for each draw

    def forward(self, plan: StepPlan) -> None:
        super().forward(plan)
        self.scripted.forward(plan)

    def sample(self, batch: SampleBatch) -> StepResult:
        self.scripted.sample(batch)
        return super().sample(batch)

    def reset(self) -> None:
        self.scripted.reset()


class ForgetfulExecutor(CountingExecutor):
    """An executor that samples one wrong token."""

    def sample(self, batch: SampleBatch) -> StepResult:
        result = super().sample(batch)
        if batch.step == 40:
            result.tokens[0] += 1
        return result
