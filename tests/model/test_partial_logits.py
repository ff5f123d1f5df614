"""Tests of logits that are computed in parts of limited size: a step gives the same result as with all logits at
once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import Tensor

from bridle.engine.sampling.padded_vocab import PaddedVocab
from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, SampleRow, ScoreRun, StepPlan, StepResult
from bridle.model import partial_logits
from bridle.model.executor import LocalExecutor
from bridle.model.partial_logits import PartialLogits
from bridle.sampling import SamplingParams
from tests.fakes import tiny_checkpoints
from tests.model.driver import load

_GREEDY = SamplingParams(temperature=0.0, logprobs=2)
_TRACED = SampleRow(0, 5, SamplingParams(temperature=0.8), key=3, num_traced=2)
#: Rows of each kind in any order; two read the same logits.
_ROWS = [
    SampleRow(1, 8, SamplingParams(temperature=1.0, repetition_penalty=1.3), key=7),
    *(SampleRow(0, index, _GREEDY) for index in (0, 1, 3, 3)),
    SampleRow(0, 4, SamplingParams(mirostat=2), key=4),
    _TRACED,
    replace(_TRACED, logits_index=2, num_traced=0),
]
_SCORES = [ScoreRun(0, 0, (5, 6, 7, 8, 9), 2), ScoreRun(1, 6, (1, 2))]


@pytest.fixture
def executor() -> LocalExecutor:
    return load(tiny_checkpoints.cached_checkpoint("gemma2"), sampler=None)


def _answer(executor: LocalExecutor) -> StepResult:
    rows = [
        PlanRow(0, 0, 6, num_logits=6, new_tokens=(5, 6, 7, 8, 9, 10), new_blocks=(0, 1), num_prompt=6),
        PlanRow(1, 0, 3, num_logits=3, new_tokens=(4, 1, 2), new_blocks=(2,), num_prompt=3),
    ]
    executor.reset()
    executor.forward(StepPlan(1, rows))
    return executor.sample(SampleBatch(1, _ROWS, _SCORES, PaddedVocab.of([3, 250, 251])))


@pytest.mark.parametrize("size", [1, 3, 8])
def test_answers_are_those_of_all_logits(executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    want = _answer(executor)
    logits = executor.logits
    assert isinstance(logits, Tensor)
    vocab_size = logits.shape[1]
    monkeypatch.setattr(partial_logits, "MAX_LOGITS", size * vocab_size)
    seen = _watch(executor, monkeypatch)
    have = _answer(executor)
    in_parts = executor.logits
    assert isinstance(in_parts, PartialLogits)
    assert in_parts.shape == (9, vocab_size)
    assert 1 <= max(seen) <= size
    assert have.tokens == want.tokens
    assert have.mus == pytest.approx(want.mus)
    assert [draw is None for draw in have.draws] == [draw is None for draw in want.draws]
    assert _logprobs(have) == pytest.approx(_logprobs(want), abs=1e-4)
    assert [len(run) for run in have.scores] == [5, 2]


def _logprobs(answer: StepResult) -> list[float]:
    return [place.logprob for place in chain(answer.logprobs, *answer.scores) if place is not None]


def _watch(executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of rows of each part of logits; return the list."""
    lowered, seen = executor.runner.lowered, []
    assert lowered is not None
    compute: Callable[[Tensor], Tensor] = lowered.logits

    def logits(hidden: Tensor) -> Tensor:
        seen.append(hidden.shape[0])
        return compute(hidden)

    monkeypatch.setattr(lowered, "logits", logits)
    return seen


def test_rows_that_nobody_samples_are_not_computed(executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_logits, "MAX_LOGITS", 1)
    seen = _watch(executor, monkeypatch)
    _answer(executor)
    assert sum(seen) == len(_ROWS) + 7
    assert torch.is_tensor(executor.runner.hidden)
