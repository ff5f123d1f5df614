"""The sampler's laws on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from bridle.engine.decision import mask_of
from tests.model.sampling_kit import random_logits, row, run

pytestmark = pytest.mark.gpu

VOCAB = 32_003


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_their_batch(dtype: torch.dtype) -> None:
    logits = random_logits(6, VOCAB, seed=1).to("cuda", dtype)
    kinds = [
        {},
        {"top_k": 40, "top_p": 0.9, "logprobs": 2},
        {"top_p": 0.99, "temperature": 2.0},
        {"min_p": 0.02, "typical_p": 0.9},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
        {"mask": mask_of(range(0, VOCAB, 5), VOCAB), "logit_bias": {10: 3.0}},
        {"temperature": 0.0},
    ]
    rows = [row(i % 6, key=i, **kind) for i, kind in enumerate(kinds * 9)]
    histories = {i: (list(range(i, 3000, 7)), 100) for i in range(6)}
    together = run(logits, rows, histories=histories)
    for i, single in enumerate(rows):
        alone = run(logits, [single], histories=histories)
        assert (alone.tokens, alone.logprobs) == ([together.tokens[i]], [together.logprobs[i]])
    padded = torch.nn.functional.pad(logits, (0, 333), value=float("-inf"))
    assert run(padded, rows, histories=histories).tokens == together.tokens


def test_masked_greedy_rows_agree_with_the_cpu() -> None:
    logits = random_logits(4, VOCAB, seed=2)
    rows = [row(i, temperature=0.0, mask=mask_of(range(i, VOCAB, 11), VOCAB)) for i in range(4)]
    assert run(logits.cuda(), rows).tokens == run(logits, rows).tokens
