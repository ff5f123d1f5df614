"""Tests of properties of the sampling kernels in Triton's interpreter.

`test_device_sampler.py` runs this file in a process of its own, where TRITON_INTERPRET is set before anything imports
Triton."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpreterBuilder as Builder
from triton.runtime.interpreter import TensorHandle

from bridle.engine.control.decision import mask_of
from bridle.engine.scheduling.step_plan import SampleBatch, SampleRow, StepResult
from bridle.lora.fused import is_interpreted
from bridle.model import sampler_self_test
from bridle.model.device_sampler import DeviceSampler
from bridle.model.sampler import StandardSampler
from bridle.model.sampler_self_test import find_problem, tried_sampler
from bridle.model.sampling import device_draw
from bridle.model.sampling.gpu_token_history import DeviceTokenHistory
from bridle.model.sampling.logprobs import FLOOR
from tests.model.addresses import check_owned, watched
from tests.model.sampling_kit import HISTORIES, LOGITS, VOCAB, random_logits, row, rows, run

assert is_interpreted(), "run this with TRITON_INTERPRET=1"

# What was not written is not a number, so that nobody can rely on it.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True

CPU = torch.device("cpu")


def _fma(_: Builder, x: Any, y: Any, z: Any) -> TensorHandle:
    """Multiply and add with a single rounding, as the fused instruction of processors does."""
    product = x.data.astype(np.float64) * y.data.astype(np.float64)
    return TensorHandle((product + z.data.astype(np.float64)).astype(np.float32), z.dtype.scalar)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small sizes, so that narrow rows of logits have several parts and short token histories several blocks."""
    monkeypatch.setattr(Builder, "create_fma", _fma)
    monkeypatch.setattr(device_draw, "PART", 256)
    monkeypatch.setattr(device_draw, "BLOCK", 16)


def told(result: StepResult) -> list[Any]:
    """Return a result for comparison, without the order of equal values at the end of its top logprobs, which may
    differ."""
    tops = [None if one is None else one.top for one in result.logprobs]
    sure = [top and [pair for pair in top if pair[1] > top[-1][1]] for top in tops]
    values = [top and [value for _, value in top] for top in tops]
    rest = [one and (one.token, one.logprob, one.rank) for one in result.logprobs]
    return [result.step, result.tokens, sure, values, rest, result.mus, list(result.draws)]


def drawn(logits: torch.Tensor, batch: list[SampleRow], sampler: DeviceSampler | None = None) -> list[Any]:
    """Return the kernels' results for comparison."""
    return told(run(logits, batch, histories=HISTORIES, sampler=sampler or DeviceSampler(CPU)))


def expected(logits: torch.Tensor, batch: list[SampleRow]) -> list[Any]:
    return told(run(logits, batch, histories=HISTORIES))


# -- beside the standard sampler ---------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(rows(), min_size=1, max_size=6), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_rows_get_what_the_standard_sampler_gives_them(batch: list[SampleRow], dtype: torch.dtype) -> None:
    """Tokens must be identical, because both samplers use the same integer weights as the C kernels."""
    logits = LOGITS.to(dtype)
    assert drawn(logits, batch) == expected(logits, batch)


USUAL: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.01},
    {"top_k": 1},
    {"top_k": 128, "top_p": 0.99},
    {"top_p": 0.9},
    {"top_p": 0.97, "temperature": 4.0},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0, "top_p": 0.9, "temperature": 1e-30},
    {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": -0.2},
    {"logit_bias": {3: 20.0, 5: -math.inf}, "bias": ((3, -1.0), (3, 0.5), (10**6, 9.0))},
    {"mask": mask_of(range(0, VOCAB, 9), VOCAB), "top_p": 0.9},
    {"mask": mask_of(range(5), VOCAB)[:8], "temperature": 3.0},
    {"mask": b"", "temperature": 0.0},
]


@pytest.mark.parametrize("kind", range(len(USUAL)))
@pytest.mark.parametrize("report", [{}, {"logprobs": 4}, {"logprobs": 0, "logprobs_mode": "processed"}])
def test_each_kind_of_usual_rows(kind: int, report: dict[str, Any]) -> None:
    batch = [row(i % len(LOGITS), key=i * 2**59, draw=i, **USUAL[kind], **report) for i in range(16)]
    assert drawn(LOGITS, batch) == expected(LOGITS, batch)


def test_nuclei_of_any_length_are_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-p may keep any number of tokens; of tokens with equal logits at the limit, the first ones stay."""
    monkeypatch.setattr(device_draw, "MAX_BEST", 16)
    logits = torch.cat([LOGITS, torch.zeros(1, VOCAB), LOGITS[:1].round()])
    batch = [
        row(i % len(logits), seq_id=0, key=i, top_p=p, temperature=t)
        for i, (p, t) in enumerate((p, t) for p in (0.3, 0.8, 0.999, 1 - 1e-12) for t in (0.5, 1.0, 6.0))
        for _ in range(3)
    ]
    assert drawn(logits, batch) == expected(logits, batch)


def test_what_is_no_number_draws_nothing() -> None:
    logits = LOGITS[:4].clone()
    logits[0, 300], logits[1, 5], logits[2] = math.nan, math.inf, -math.inf
    batch = [row(i, temperature=t, logprobs=2, top_p=p) for i in range(4) for t in (0.0, 1.0) for p in (1.0, 0.9)]
    assert drawn(logits, batch) == expected(logits, batch)
    assert run(logits, batch, sampler=DeviceSampler(CPU)).tokens[:12] == [-1] * 12
    forbidden = [row(0, mask=mask_of([1, 2], VOCAB), logprobs=2)]  # what may not be drawn need not be a number
    have, want = (run(logits, forbidden, sampler=each) for each in (DeviceSampler(CPU), StandardSampler()))
    assert have.tokens == want.tokens
    assert [(one.logprob, one.top) for one in have.logprobs if one] == [(FLOOR, ())]


# -- rows --------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.lists(rows(), min_size=1, max_size=6), st.sampled_from([1, 2 * VOCAB]))
def test_a_row_is_bitwise_the_same_alone_and_among_others(batch: list[SampleRow], budget: int) -> None:
    together = run(LOGITS, batch, histories=HISTORIES, sampler=DeviceSampler(CPU, budget))
    for i, single in enumerate(batch):
        alone = run(LOGITS, [single], histories=HISTORIES, sampler=DeviceSampler(CPU))
        assert (alone.tokens[0], alone.logprobs[0]) == (together.tokens[i], together.logprobs[i])


@settings(max_examples=15)
@given(st.lists(rows(), min_size=1, max_size=4), st.sampled_from([1, 247, 900]))
def test_padding_the_vocabulary_changes_no_token(batch: list[SampleRow], extra: int) -> None:
    batch = [each for each in batch if each.sampling.top_k <= VOCAB]  # beyond, top-k means something else
    padded = torch.cat([LOGITS, torch.full((len(LOGITS), extra), -math.inf)], dim=1)
    want = run(LOGITS, batch, histories=HISTORIES, sampler=DeviceSampler(CPU))
    assert run(padded, batch, histories=HISTORIES, sampler=DeviceSampler(CPU)).tokens == want.tokens


@settings(max_examples=15)
@given(st.lists(rows(), min_size=1, max_size=4), st.sampled_from([100, 256]))
def test_where_parts_end_changes_nothing(batch: list[SampleRow], narrow: int) -> None:
    logits = LOGITS[:, :narrow].contiguous()
    want = drawn(logits, batch)
    with patch.object(device_draw, "PART", 64):
        assert drawn(logits, batch) == want


def test_steps_do_not_disturb_each_other() -> None:
    """One sampler runs 30 steps, whose masks reuse memory, before the tokens of any step are read."""
    sampler = DeviceSampler(CPU)
    masks = [mask_of(range(n, VOCAB, 7), VOCAB) for n in range(90)]
    batches = [
        [row(i, key=step, mask=masks[(11 * step + (5 + step) * i) % 90], seq_id=i, top_k=9) for i in range(8)]
        for step in range(30)
    ]
    drawings = [sampler.draw(LOGITS, SampleBatch(7, batch), lambda row: ((), 0)) for batch in batches]
    wanted = [run(LOGITS, batch).tokens for batch in batches]
    assert [each.tokens.tolist() for each in drawings] == wanted  # what the next step would take
    assert [each.take().tokens for each in drawings] == wanted


def test_tokens_that_lie_apart_have_to_be_waited_for() -> None:
    usual, rare = row(0, top_k=9), row(1, typical_p=0.5)
    drawing = DeviceSampler(CPU).draw(LOGITS, SampleBatch(7, [usual, rare]), lambda row: ((), 0))
    assert drawing.tokens is None
    assert drawing.take().tokens == run(LOGITS, [usual, rare]).tokens


@settings(max_examples=8)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), min_size=2, max_size=5), st.integers(0, 600))
def test_histories_that_go_on_from_step_to_step_count_as_whole_ones(changes: list[Any], max_words: int) -> None:
    """Penalties are right after rollbacks, and if the device lacks memory for some token histories."""
    sampler = DeviceSampler(CPU)
    sampler.drawer._kept = DeviceTokenHistory(CPU, max_words)
    penalties = {"repetition_penalty": 1.7, "presence_penalty": 3.0, "frequency_penalty": 2.0}
    batch = [row(number % len(LOGITS), seq_id=number, key=number, **penalties) for number in range(3)]
    tokens: dict[int, list[int]] = {number: [number] * 5 for number in range(3)}
    for added, dropped in changes:
        for number, history in tokens.items():
            del history[len(history) - min(dropped * (number == 1), len(history)) :]
            history += [(3 * each + number) % LOGITS.shape[1] for each in range(added)]
        known = {number: (history, 4) for number, history in tokens.items()}
        want = run(LOGITS, batch, histories=known)
        assert told(run(LOGITS, batch, histories=known, sampler=sampler)) == told(want)


@settings(max_examples=10)
@given(st.lists(rows(), min_size=1, max_size=4))
def test_no_program_leaves_its_tensors(batch: list[SampleRow]) -> None:
    batch = [*batch, row(0, seq_id=0, top_p=0.9, temperature=5.0, logprobs=2, presence_penalty=1.0)]
    launch, held = device_draw.DrawStep.launch, []

    def noted(self: Any, name: str, *grid: int, **more: Any) -> None:
        held.extend(each for each in self._given.values() if isinstance(each, torch.Tensor))
        launch(self, name, *grid, **more)

    with watched() as touched, patch.object(device_draw.DrawStep, "launch", noted):
        run(LOGITS, batch, histories=HISTORIES, sampler=DeviceSampler(CPU))
    assert touched
    check_owned(touched, held)


# -- the trial ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_trial_lets_the_kernels_pass_and_no_others(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_draw, "PART", 4096)
    monkeypatch.setattr(device_draw, "BLOCK", 1024)
    assert isinstance(tried_sampler(CPU, dtype, 5003), DeviceSampler)
    monkeypatch.setattr(sampler_self_test, "KINDS", sampler_self_test.KINDS[:2])
    honest = device_draw.DrawStep.launch

    def forgetful(self: Any, name: str, *grid: int, **more: Any) -> None:
        if name == "pick":
            self._given["longs"].fill_(1)  # everybody draws the same number
        honest(self, name, *grid, **more)

    monkeypatch.setattr(device_draw.DrawStep, "launch", forgetful)
    assert "was drawn in place of" in str(find_problem(DeviceSampler(CPU), CPU, dtype, 5003))
    assert isinstance(tried_sampler(CPU, dtype, 5003), StandardSampler)
    assert "sampling on cpu runs in plain torch" in caplog.text


def test_random_logits_are_drawn_over_many_parts() -> None:
    logits = random_logits(2, 9001, seed=3)
    batch = [row(i % 2, key=i, temperature=8.0) for i in range(40)]
    assert run(logits, batch, sampler=DeviceSampler(CPU)).tokens == run(logits, batch).tokens
