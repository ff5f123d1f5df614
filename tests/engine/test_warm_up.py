"""The largest step of the warm-up uses all features of requests: on a GPU it scores prompts, on a CPU it does not."""

from __future__ import annotations

import pytest

from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.scheduling.step_plan import SampleBatch, StepPlan, StepResult
from bridle.engine.warm_up import run_largest_step


class Noting:
    """An executor that records its calls."""

    def __init__(self, device: str) -> None:
        self.info = ExecutorInfo("noting", 100, 64, 64, 4, device=device, max_num_batched_tokens=40, max_num_seqs=4)
        self.plans: list[StepPlan] = []
        self.batches: list[SampleBatch] = []

    def forward(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def sample(self, batch: SampleBatch) -> StepResult:
        self.batches.append(batch)
        return StepResult(batch.step, [0] * len(batch.rows), [None] * len(batch.rows))

    def reset(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_prompts_are_scored_where_memory_has_to_be_known(device: str) -> None:
    executor = Noting(device)
    found = run_largest_step(executor)
    assert (found.num_tokens, found.num_seqs) == (40, 4)
    plan, batch = executor.plans[0], executor.batches[0]
    counts = [row.num_logits for row in plan.rows]
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    assert counts == ([1, 1, 1, 1] if device == "cpu" else [40, 1, 1, 1])
    assert [row.logits_index for row in batch.rows] == [end - 1 for end in ends]
    scored = [(run.seq_id, run.logits_start, len(run.tokens)) for run in batch.scores]
    assert scored == ([] if device == "cpu" else [(0, 0, 40)])
