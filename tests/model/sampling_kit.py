"""What the sampler tests share: rows and batches in one line each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bridle.engine.interfaces import Sampler
from bridle.engine.scheduling.step_plan import SampleBatch, SampleRow, ScoreRun, StepResult
from bridle.model.sampler import StandardSampler
from bridle.sampling import SamplingParams


def row(index: int = 0, **fields: Any) -> SampleRow:
    """A sample row; the fields of `SampleRow` are taken out, all others are sampling parameters."""
    own = {name: fields.pop(name) for name in ("seq_id", "key", "draw", "mask", "bias", "mu") if name in fields}
    return SampleRow(own.pop("seq_id", index), index, SamplingParams(**fields), **own)


def run(
    logits: torch.Tensor,
    rows: Sequence[SampleRow] = (),
    scores: Sequence[ScoreRun] = (),
    histories: dict[int, tuple[Sequence[int], int]] | None = None,
    sampler: Sampler | None = None,
) -> StepResult:
    """One call of a sampler; sequences without a history have an empty one."""
    batch = SampleBatch(step=7, rows=list(rows), scores=list(scores))
    known = histories or {}
    return (sampler or StandardSampler())(logits, batch, lambda row: known.get(row.seq_id, ((), 0)))


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale
