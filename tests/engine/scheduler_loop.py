"""A loop that runs a scheduler without an engine. The loop computes each step at once."""

from __future__ import annotations

from random import Random
from typing import Any, Literal

from bridle.engine.kv.block_manager import BlockManager
from bridle.engine.scheduling.scheduler import Scheduler
from bridle.engine.scheduling.step_plan import SampleBatch, SampleRow, StepPlan
from bridle.engine.sequence import Sequence
from bridle.sampling import SamplingParams
from bridle.testing.scripted import ScriptedExecutor
from tests.engine.support import make_sequence

GREEDY = SamplingParams(temperature=0.0)


class Loop:
    """A scheduler, a block manager and an executor, connected by greedy sampling."""

    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 4,
        budget: int = 8,
        max_num_seqs: int = 8,
        kv: Literal["paged", "sequences"] = "paged",
        **knobs: Any,
    ) -> None:
        self.executor = ScriptedExecutor(8, num_blocks, block_size, kv=kv)
        self.blocks = BlockManager(num_blocks, block_size, enable_prefix_caching=kv == "paged")
        self.scheduler = Scheduler(self.blocks, budget, max_num_seqs, kv=kv, **knobs)
        self.live: list[Sequence] = []
        self.num_made = 0

    def add(self, tokens: list[int], max_len: int, **fields: object) -> Sequence:
        self.num_made += 1
        seq = make_sequence(self.num_made, tokens, max_len=max_len, **fields)
        self.scheduler.add(seq)
        self.live.append(seq)
        return seq

    def step(self) -> StepPlan:
        """Run one step, and remove sequences that have reached their length."""
        plan, scheduled = self.scheduler.schedule()
        self.executor.forward(plan)
        self.scheduler.commit(scheduled)
        drawing = [item for item in scheduled if item.end == len(item.seq.tokens)]
        batch = SampleBatch(plan.step)
        for item in drawing:
            batch.rows.append(SampleRow(item.seq.id, item.last_logit, GREEDY))
        result = self.executor.sample(batch)
        for item, token in zip(drawing, result.tokens, strict=True):
            item.seq.tokens.append(token)
            if len(item.seq.tokens) >= item.seq.max_len:
                self.finish(item.seq)
        self.blocks.check_integrity(self.live)
        return plan

    def finish(self, seq: Sequence) -> None:
        self.scheduler.remove(seq)
        self.live.remove(seq)

    def fork(self, parent: Sequence) -> Sequence:
        self.num_made += 1
        child = parent.fork(self.num_made, 1, 1)
        self.scheduler.add_fork(parent, child)
        self.live.append(child)
        return child

    def run_dry(self, max_steps: int = 2_000) -> int:
        """Run steps until all sequences have ended. Fails after too many steps, which means starvation."""
        for number in range(max_steps):
            if not self.live:
                assert self.blocks.num_free == self.blocks.num_blocks
                return number
            self.step()
        raise AssertionError(f"{len(self.live)} sequences starve after {max_steps} steps")


def ample_loop(random: Random, **knobs: Any) -> Loop:
    """Return a loop in which only the batching settings can delay a prompt."""
    return Loop(num_blocks=400, block_size=4, budget=200, max_num_seqs=50, **knobs)
