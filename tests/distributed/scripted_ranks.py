"""A scripted model in two processes: each process computes every second position, and gloo adds the parts.

Run as a program, this module is rank 1, which follows rank 0's plans like any rank. Rank 1 reads its executor from a
file at each reset, so that one process serves the labs of many tests.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bridle.distributed.child_process import die_with_parent
from bridle.distributed.group import beat, follow
from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.scheduling.step_plan import SampleBatch, StepPlan, StepResult
from bridle.errors import BridleError, InternalError
from bridle.model.tensor_parallel import join_group
from bridle.testing.logits import Digests, Logits, ScriptedModel, Tokens
from bridle.testing.scripted import ScriptedExecutor

_HALF = np.uint64(32)
_LOW = np.uint64((1 << 32) - 1)


class SplitModel(ScriptedModel):
    """A rank's part of `whole`. The contributions of positions to a row are summed over the ranks, as in a row-parallel
    layer."""

    def __init__(self, whole: ScriptedModel, rank: int) -> None:
        super().__init__(whole.vocab_size, whole.seed, whole.next_token, whole.spread)
        self._rank = rank

    def rows(self, tokens: Tokens, digests: Digests, num_rows: int) -> list[Logits]:
        length = len(tokens)
        mine = np.arange(length) % 2 == self._rank
        weights = np.arange(1, 2 * length, 2, dtype=np.uint64) * mine  # [n]
        parts = np.cumsum(digests * weights, dtype=np.uint64)[length - num_rows :]  # [rows]
        halves = torch.from_numpy(np.stack([parts & _LOW, parts >> _HALF]).astype(np.int64))  # [2, rows]
        dist.all_reduce(halves)
        low, high = halves.numpy().astype(np.uint64)
        if self.next_token is not None:
            return super().rows(tokens, digests, num_rows)
        return [self._hashed(context) for context in low + (high << _HALF)]


class Rank:
    """An executor that computes this rank's part of a scripted model."""

    def __init__(self, executor: ScriptedExecutor, rank: int) -> None:
        self._executor = executor
        self._rank = rank

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    def forward(self, plan: StepPlan) -> None:
        """Run the executor's forward pass with the split model. Afterwards, other callers have the whole model
        again."""
        whole = self._executor.model
        self._executor.model = SplitModel(whole, self._rank)
        try:
            self._executor.forward(plan)
        except RuntimeError as error:  # of a collective: the step failed on the way
            raise InternalError(f"step {plan.step} failed: {error}") from error
        finally:
            self._executor.model = whole

    def sample(self, batch: SampleBatch) -> StepResult:
        return self._executor.sample(batch)

    def embed(self, step: int, logits_rows: Sequence[int]) -> list[array[float]]:
        return self._executor.embed(step, logits_rows)

    def reset(self) -> None:
        self._executor.reset()

    def close(self) -> None:
        self._executor.close()


def options_of(executor: ScriptedExecutor) -> dict[str, Any]:
    """Return the options with which another process follows the same plans, and fails at the same steps."""
    names = ("vocab_size", "num_blocks", "block_size", "kv", "max_model_len", "max_num_batched_tokens", "max_num_seqs")
    info, model = executor.info, executor.model
    return {
        "faults": sorted(executor.device.faults),
        "options": {"seed": model.seed, "spread": model.spread, **{name: getattr(info, name) for name in names}},
    }


def resets_of(options: Path) -> Path:
    """Return the file in which rank 1 counts its resets."""
    return options.with_suffix(".resets")


class Follower(Rank):
    """The executor of rank 1, which is replaced when its file has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = self._num_resets = 0
        self._hang_at: int | None = None
        super().__init__(ScriptedExecutor(), 1)

    def reset(self) -> None:
        """Begin again. Rank 0 gets the number of resets, because it may not change the file before a late reset."""
        self._begin_again()
        self._num_resets += 1
        resets = resets_of(self._path)
        fresh = resets.with_suffix(".fresh")
        fresh.write_text(str(self._num_resets))
        fresh.replace(resets)

    def _begin_again(self) -> None:
        told = json.loads(self._path.read_text())
        if told["number"] == self._number:
            super().reset()
            return
        self._number = told["number"]
        faults = {number: BridleError("as rank 0 does") for number in told["faults"]}
        self._executor = ScriptedExecutor(**told["options"], faults=faults)
        self._hang_at = told.get("hang_at")

    def forward(self, plan: StepPlan) -> None:
        """Run a forward pass. The pass with the given number hangs."""
        if self._hang_at is not None and self._executor.num_forwards == self._hang_at:
            threading.Event().wait()
        super().forward(plan)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--options", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(options.parent)
    join_group(options.store, 1, 2, torch.device("cpu"))
    beat(sys.stdout.buffer)
    return follow(Follower(options.options), sys.stdin.buffer)


if __name__ == "__main__":
    sys.exit(main())
