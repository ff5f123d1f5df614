"""The ranks of a tensor-parallel group watch each other: a rank that ends, hangs or misses a collective is noticed."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from queue import SimpleQueue

import pytest
from torch.distributed import distributed_c10d as c10d

from bridle.distributed import group
from bridle.distributed.group import GroupExecutor, Members
from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, StepPlan
from bridle.errors import ShardUnavailable
from bridle.testing.scripted import ScriptedExecutor
from tests.distributed.kit import IDLE
from tests.distributed.ways import TwoRanks
from tests.waiting import PATIENCE


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("how", "reason"), [(signal.SIGKILL, "ended with status -9"), (signal.SIGSTOP, "no sign of life from rank 2")]
)
def test_a_rank_that_ends_or_hangs_is_noticed(
    how: signal.Signals, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how is signal.SIGSTOP:  # longer than a rank that runs may wait for a processor
        monkeypatch.setattr(group, "SILENCE_SECONDS", 5.0)
    lost: SimpleQueue[str] = SimpleQueue()
    members = Members([[sys.executable, "-c", IDLE]] * 2, on_loss=lost.put)
    try:
        members.wait()
        os.kill(members.pids[1], how)
        assert reason in lost.get(timeout=PATIENCE)
    finally:
        members.close()


def plan(step: int) -> StepPlan:
    return StepPlan(step, [PlanRow(step, 0, 4, new_tokens=(1, 2, 3, 4), new_blocks=(step,), num_prompt=4)])


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_a_collective_loses_the_step() -> None:
    """The rank sends heartbeats all the time, so only the time limit of the collective detects its absence."""
    ranks = TwoRanks()
    try:
        ranks.open()
        c10d._set_pg_timeout(timedelta(seconds=2), c10d._get_default_group())
        executor = ScriptedExecutor()
        both = ranks.behind(executor, hang_at=1)
        assert isinstance(both, GroupExecutor)
        both.reset()
        both.forward(plan(1))
        both.sample(SampleBatch(1))
        with pytest.raises(ShardUnavailable, match="did not run the same step"):
            both.forward(plan(2))
        assert ranks.losses == []
    finally:
        ranks.close()


def test_a_rank_that_is_gone_is_a_lost_shard() -> None:
    members = Members([[sys.executable, "-c", ""]], on_loss=lambda reason: None)
    try:
        members.wait()
        with pytest.raises(ShardUnavailable, match="a rank of the tensor-parallel group has ended"):
            GroupExecutor(ScriptedExecutor(), members).forward(plan(1))
    finally:
        members.close()
