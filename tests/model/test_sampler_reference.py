"""Tests of the sampler, compared with transformers' logits processors and with the frequencies of many samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from tests.model.sampling_kit import random_logits, row, run

VOCAB, DRAWS = 60, 6000
HISTORY = [3, 7, 7, 11, 59]

CASES: list[tuple[dict[str, float], list[LogitsProcessor]]] = [
    ({}, []),
    ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
    ({"top_k": 5}, [TopKLogitsWarper(5)]),
    ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
    ({"typical_p": 0.6}, [TypicalLogitsWarper(0.6)]),
    ({"repetition_penalty": 1.8}, [RepetitionPenaltyLogitsProcessor(1.8)]),
    (
        {"repetition_penalty": 0.7, "temperature": 1.7, "top_k": 20, "top_p": 0.9},
        [
            RepetitionPenaltyLogitsProcessor(0.7),
            TemperatureLogitsWarper(1.7),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
        ],
    ),
    (
        {"temperature": 1.2, "top_k": 30, "top_p": 0.95, "min_p": 0.03, "typical_p": 0.8},
        [
            TemperatureLogitsWarper(1.2),
            TopKLogitsWarper(30),
            TopPLogitsWarper(0.95),
            MinPLogitsWarper(0.03),
            TypicalLogitsWarper(0.8),
        ],
    ),
]


def expected_probabilities(logits: torch.Tensor, processors: list[LogitsProcessor]) -> np.ndarray:
    scores = logits.clone()
    for processor in processors:
        scores = processor(torch.tensor([HISTORY]), scores)
    return scores.softmax(-1)[0].double().numpy()


@pytest.mark.few(5)
@pytest.mark.parametrize(("fields", "processors"), CASES, ids=[",".join(c[0]) or "plain" for c in CASES])
def test_draws_follow_the_distribution_of_the_reference(
    fields: dict[str, float], processors: list[LogitsProcessor]
) -> None:
    logits = random_logits(1, VOCAB, seed=3, scale=2.0)
    expected = expected_probabilities(logits, processors)
    rows = [row(0, key=key, draw=4, **fields) for key in range(DRAWS)]
    counts = np.bincount(run(logits, rows, histories={0: (HISTORY, 2)}).tokens, minlength=VOCAB)
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(expected))  # the same tokens survive
    common = expected * DRAWS >= 5
    rest = max(DRAWS * expected[~common].sum(), 1e-9), counts[~common].sum()
    chi2 = ((counts - DRAWS * expected)[common] ** 2 / (DRAWS * expected[common])).sum()
    chi2 += (rest[1] - rest[0]) ** 2 / max(rest[0], 1.0)
    freedom = max(int(common.sum()), 1)
    assert chi2 < freedom + 4.5 * np.sqrt(2 * freedom) + 8  # far beyond the 99.9th percentile
    assert counts[expected * DRAWS > 25].min() > 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("fields", "processors"), CASES[2:6], ids=[",".join(c[0]) for c in CASES[2:6]])
def test_exactly_the_reference_tokens_survive(
    fields: dict[str, float], processors: list[LogitsProcessor], seed: int
) -> None:
    from bridle.model.sampling.filters import apply_filters
    from bridle.model.sampling.rows import gather
    from bridle.sampling import SamplingParams

    logits = random_logits(1, 3000, seed=seed)
    work = gather(logits, [0])
    work -= work.max()
    apply_filters(work, [SamplingParams(**fields)])
    survivors = torch.isfinite(work[0]).nonzero().flatten().tolist()
    scores = processors[0](torch.tensor([HISTORY]), logits.clone())
    assert survivors == torch.isfinite(scores[0]).nonzero().flatten().tolist()
