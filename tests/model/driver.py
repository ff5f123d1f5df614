"""Step plans built by hand, and a driver without a scheduler, for tests of the executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from bridle.config import ModelConfig
from bridle.engine.interfaces import HistoryLookup
from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, SampleRow, StepPlan, StepResult
from bridle.model.executor import LocalExecutor
from bridle.model.loading import load_executor
from bridle.sampling import SamplingParams
from tests.fakes import vision_checkpoints

GREEDY = SamplingParams(temperature=0.0)


def argmax_sampler(logits: Any, batch: SampleBatch, history: HistoryLookup) -> StepResult:
    """Sample the most probable token, without masks, penalties or log-probabilities."""
    tokens = [int(logits[row.logits_index].argmax()) for row in batch.rows]
    return StepResult(batch.step, tokens, [None] * len(tokens))


def load(path: Any, *, sampler: Any = argmax_sampler, **settings: Any) -> LocalExecutor:
    """Load an executor for the checkpoint `path` with a small KV pool and a greedy sampler. `sampler=None` selects the
    engine's own sampler, which also applies biases."""
    config = ModelConfig(model=str(path), **{"num_blocks": 128, "block_size": 4, **settings})
    return load_executor(config, sampler=sampler)


class NaiveDriver:
    """Generates greedily for several prompts at once: the first step computes whole prompts, each later step one token
    of each."""

    def __init__(self, executor: LocalExecutor, prompts: Sequence[Sequence[int]]) -> None:
        self.executor = executor
        self.size = executor.info.block_size
        self.tokens = {number: list(prompt) for number, prompt in enumerate(prompts)}
        self.num_prompt = {number: len(prompt) for number, prompt in enumerate(prompts)}
        self.known = dict.fromkeys(self.tokens, 0)  # tokens in the mirror
        self.computed = dict.fromkeys(self.tokens, 0)
        self.blocks: dict[int, list[int]] = {number: [] for number in self.tokens}
        self.free = list(range(executor.info.num_blocks))
        self.step = 0

    def row(self, number: int, count: int | None = None) -> PlanRow:
        """Return a row for the next `count` tokens of a sequence (None: all pending tokens), with logits of the last
        token."""
        tokens, start = self.tokens[number], self.computed[number]
        end = len(tokens) if count is None else min(len(tokens), start + count)
        needed = -(-end // self.size) - len(self.blocks[number])
        fresh = tuple(self.free.pop(0) for _ in range(needed))
        row = PlanRow(
            number,
            start,
            end - start,
            num_logits=1,
            num_kept=self.known[number],
            new_tokens=tuple(tokens[self.known[number] :]),
            num_kept_blocks=len(self.blocks[number]),
            new_blocks=fresh,
            num_prompt=self.num_prompt[number],
        )
        self.blocks[number] += fresh
        self.known[number], self.computed[number] = len(tokens), end
        return row

    def run_step(self, counts: dict[int, int | None]) -> dict[int, int]:
        """Run one step over the given sequences; append the sampled token to each sequence that is completely
        computed."""
        rows = [self.row(number, count) for number, count in counts.items()]
        self.step += 1
        self.executor.forward(StepPlan(self.step, rows))
        batch = SampleBatch(self.step, [SampleRow(row.seq_id, i, GREEDY) for i, row in enumerate(rows)])
        drawn = dict(zip(counts, self.executor.sample(batch).tokens, strict=True))
        for number, token in drawn.items():
            if self.computed[number] == len(self.tokens[number]):
                self.tokens[number].append(token)
        return drawn

    def generate(self, num_tokens: int) -> list[list[int]]:
        """Return the greedy continuation of each prompt."""
        for _ in range(num_tokens):
            self.run_step(dict.fromkeys(self.tokens))
        return [tokens[self.num_prompt[number] :] for number, tokens in self.tokens.items()]


#: Why older releases of the library are nothing to compare with.
_OLDER = {
    "idefics3": "needs torchvision to cut pictures",
    "paligemma2": "leaves out the cap of logits",
    "smolvlm": "needs torchvision to cut pictures",
    "videos of llava_onevision": "adds the last row of a video in its own forward pass",
    "videos of qwen2_5_vl": "takes whole seconds of a video's grid",
    "videos of smolvlm": "needs torchvision to cut pictures",
}


def skip_older(family: str) -> None:
    """Skip the test of a family that transformers before 5.23 lacks or computes differently."""
    name = family.removeprefix("videos of ")
    if vision_checkpoints.MODEL_TYPES.get(name, name) not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no family {family!r}")
    if family in _OLDER and Version(transformers.__version__) < Version("5.23"):
        pytest.skip(f"transformers {transformers.__version__} {_OLDER[family]}")


class Recorder:
    """A greedy sampler that keeps the logits of each step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, logits: Any, batch: SampleBatch, history: HistoryLookup) -> StepResult:
        self.seen.append(logits.clone())
        return argmax_sampler(logits, batch, history)


def record(path: Any, **settings: Any) -> tuple[LocalExecutor, torch.Tensor]:
    """Run a few steps over short and long prompts; return the executor and the logits."""
    recorder = Recorder()
    executor = load(path, sampler=recorder, **settings)
    NaiveDriver(executor, [[5, 9, 200, 33, 7, 8, 100], [17, 4], [250] * 30]).generate(4)
    return executor, torch.cat(recorder.seen)
