"""Tests of the sampler's properties on a CUDA device, in plain torch and in kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bridle.engine.control.decision import mask_of
from bridle.engine.interfaces import Sampler
from bridle.engine.scheduling.step_plan import SampleBatch
from bridle.model.device_sampler import DeviceSampler
from bridle.model.sampler import StandardSampler
from bridle.model.sampler_self_test import tried_sampler
from tests.model.sampling_kit import random_logits, row, run

pytestmark = pytest.mark.gpu

VOCAB = 32_003
CUDA = torch.device("cuda")
MAKES: list[Callable[[], Sampler]] = [StandardSampler, lambda: DeviceSampler(CUDA)]
USUAL: list[dict[str, Any]] = [
    {},
    {"top_k": 40, "top_p": 0.9, "logprobs": 2},
    {"top_p": 0.99, "temperature": 2.0},
    {"min_p": 0.02, "top_p": 0.9},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
    {"mask": mask_of(range(0, VOCAB, 5), VOCAB), "logit_bias": {10: 3.0}, "logprobs": 3, "logprobs_mode": "processed"},
    {"temperature": 0.0},
]
HISTORIES = {i: (list(range(i, 3000, 7)), 100) for i in range(6)}


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_their_batch(dtype: torch.dtype, make: Callable[[], Sampler]) -> None:
    logits = random_logits(6, VOCAB, seed=1).to("cuda", dtype)
    kinds = [*USUAL, {"min_p": 0.02, "typical_p": 0.9}]
    rows = [row(i % 6, key=i, **kind) for i, kind in enumerate(kinds * 9)]
    sampler = make()
    together = run(logits, rows, histories=HISTORIES, sampler=sampler)
    for i, single in enumerate(rows):
        alone = run(logits, [single], histories=HISTORIES, sampler=sampler)
        assert (alone.tokens, alone.logprobs) == ([together.tokens[i]], [together.logprobs[i]])
    padded = torch.nn.functional.pad(logits, (0, 333), value=float("-inf"))
    assert run(padded, rows, histories=HISTORIES, sampler=sampler).tokens == together.tokens


@pytest.mark.parametrize("make", MAKES)
def test_masked_greedy_rows_agree_with_the_cpu(make: Callable[[], Sampler]) -> None:
    logits = random_logits(4, VOCAB, seed=2)
    rows = [row(i, temperature=0.0, mask=mask_of(range(i, VOCAB, 11), VOCAB)) for i in range(4)]
    assert run(logits.cuda(), rows, sampler=make()).tokens == run(logits, rows).tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_kernels_pass_their_trial(dtype: torch.dtype) -> None:
    assert isinstance(tried_sampler(CUDA, dtype, 151_936), DeviceSampler)


def test_kernels_draw_what_the_cpu_draws() -> None:
    logits = random_logits(6, VOCAB, seed=4).bfloat16()
    rows = [row(i % 6, key=i, **kind) for i, kind in enumerate(USUAL * 30)]
    want = run(logits, rows, histories=HISTORIES).tokens
    assert run(logits.cuda(), rows, histories=HISTORIES, sampler=DeviceSampler(CUDA)).tokens == want


def test_nobody_waits_before_the_tokens_are_taken() -> None:
    logits = random_logits(6, VOCAB, seed=5).cuda()
    rows = [row(i % 6, key=i, **kind) for i, kind in enumerate(USUAL)]
    sampler = DeviceSampler(CUDA)
    batch = SampleBatch(1, rows)
    want = sampler.draw(logits, batch, lambda row: HISTORIES[row.seq_id]).take()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawing = sampler.draw(logits, batch, lambda row: HISTORIES[row.seq_id])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert drawing.take() == want
