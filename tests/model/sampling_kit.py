"""Helpers of the sampler tests that make rows and run batches in one line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from bridle.engine.control.decision import mask_of
from bridle.engine.interfaces import Sampler
from bridle.engine.scheduling.step_plan import SampleBatch, SampleRow, ScoreRun, StepResult
from bridle.model.sampler import StandardSampler
from bridle.sampling import SamplingParams


def row(index: int = 0, **fields: Any) -> SampleRow:
    """Return a sample row; fields of `SampleRow` are taken from `fields`, and all others are sampling parameters."""
    own = {name: fields.pop(name) for name in ("seq_id", "key", "draw", "mask", "bias", "mu") if name in fields}
    return SampleRow(own.pop("seq_id", index), index, SamplingParams(**fields), **own)


def run(
    logits: torch.Tensor,
    rows: Sequence[SampleRow] = (),
    scores: Sequence[ScoreRun] = (),
    histories: dict[int, tuple[Sequence[int], int]] | None = None,
    sampler: Sampler | None = None,
) -> StepResult:
    """Call a sampler once; sequences without an entry in `histories` have an empty history."""
    batch = SampleBatch(step=7, rows=list(rows), scores=list(scores))
    known = histories or {}
    return (sampler or StandardSampler())(logits, batch, lambda row: known.get(row.seq_id, ((), 0)))


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale


VOCAB = 777
LOGITS = torch.cat([random_logits(4, VOCAB, seed=5), (random_logits(4, VOCAB, seed=6) * 4).round() / 4])
HISTORIES = {i: ([(7 * i + j * j) % VOCAB for j in range(40 + i)] + [4, 4], 9) for i in range(8)}
MASKS = [None, mask_of(range(0, VOCAB, 3), VOCAB), mask_of([4, 5, 6], VOCAB), mask_of([], VOCAB)]


@st.composite
def rows(draw: st.DrawFn) -> SampleRow:
    fields = {
        "temperature": draw(st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0])),
        "top_k": draw(st.sampled_from([0, 1, 7, 200, 776, 5000])),
        "top_p": draw(st.sampled_from([1.0, 0.95, 0.5, 1e-6])),
        "min_p": draw(st.sampled_from([0.0, 0.05, 1.0])),
        "typical_p": draw(st.sampled_from([1.0, 0.9, 0.2])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.6])),
        "frequency_penalty": draw(st.sampled_from([0.0, -0.2])),
        "top_n_sigma": draw(st.sampled_from([-1.0, 0.0, 0.5, 2.0])),
        "xtc_probability": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "xtc_threshold": draw(st.sampled_from([0.01, 0.1, 0.4])),
        "dynatemp_range": draw(st.sampled_from([0.0, 0.3, 5.0])),
        "dynatemp_exponent": draw(st.sampled_from([0.0, 1.0, 3.0])),
        "mirostat": draw(st.sampled_from([0, 2])),
        "mirostat_tau": draw(st.sampled_from([0.0, 1.0, 5.0])),
        "mu": draw(st.sampled_from([None, -3.0, 0.5, 4.0, 1e3])),
        "dry_multiplier": draw(st.sampled_from([0.0, 0.8])),
        "dry_allowed_length": draw(st.sampled_from([0, 1, 2])),
        "dry_breaker_ids": draw(st.sampled_from([(), (4,), (99, 100)])),
        "logit_bias": draw(st.sampled_from([{}, {3: 2.0, 9: -math.inf}])),
        "logprobs": draw(st.sampled_from([None, 0, 3])),
        "logprobs_mode": draw(st.sampled_from(["raw", "processed"])),
        "mask": draw(st.sampled_from(MASKS)),
        "bias": draw(st.sampled_from([(), ((4, 1.5),)])),
    }
    kept = draw(st.sets(st.sampled_from(sorted(fields)), max_size=7))
    index = draw(st.integers(0, len(LOGITS) - 1))
    chosen = {name: fields[name] for name in sorted(kept)}
    return row(index, key=draw(st.integers(0, 2**64)), draw=draw(st.integers(0, 2**40)), **chosen)
