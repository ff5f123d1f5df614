"""The green-list watermark of Kirchenbauer et al. (arXiv 2301.10226): half of the vocabulary, chosen by a hash of the
previous token, gets a small bonus, so that text of a model can later be told from other text.

The list is that of text-generation-inference: seeded with 15485863 times the previous token, so that its detectors
read what is written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from bridle.engine.interfaces import HistoryLookup
from bridle.engine.scheduling.step_plan import SampleRow

_HASH_KEY = 15485863
_CACHED_LISTS = 64


def apply_watermarks(work: torch.Tensor, rows: Sequence[SampleRow], history: HistoryLookup, vocab: int) -> None:
    """Add the bonus, in place, to the green tokens of the rows that ask for a watermark. `work` is [len(rows), W]."""
    for i, row in enumerate(rows):
        mark = row.sampling.watermark
        if mark is None:
            continue
        tokens, _ = history(row)
        if len(tokens):
            green = _green_list(int(tokens[-1]), vocab, mark.gamma)
            work[i, :vocab] += green.to(work.device) * mark.delta


@lru_cache(_CACHED_LISTS)
def _green_list(previous: int, vocab: int, gamma: float) -> torch.Tensor:
    """[vocab] of 0 and 1. Sampled on the CPU, so that it does not depend on the device."""
    generator = torch.Generator().manual_seed(_HASH_KEY * previous)
    green = torch.zeros(vocab, dtype=torch.float32)
    green[torch.randperm(vocab, generator=generator)[: int(vocab * gamma)]] = 1.0
    return green
