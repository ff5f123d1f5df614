"""Mirostat 2.0 (Basu et al., arXiv 2007.14966, algorithm 2).

Only tokens whose surprise, -log2 p, is at most mu may be sampled; the most probable token always may. After each token,
mu decreases by eta times the difference between the observed surprise and the target tau.

mu begins at twice tau. This module stores no state: an input row contains its sequence's mu, and the result contains
the next mu.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from bridle.engine.scheduling.step_plan import SampleRow
from bridle.model.h2d_copies import upload_list
from bridle.model.sampling.fixed_point_probs import totals, weights_of

_NEVER = float("-inf")
_MOST = 1000.0  # limit of mu, so that 2 ** mu is finite


def mu_of(row: SampleRow) -> float:
    """Return the row's mu, the largest surprise of a token that may be sampled."""
    return 2.0 * row.sampling.mirostat_tau if row.mu is None else row.mu


def cut_surprising(x: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Remove, in place, tokens whose surprise exceeds the row's mu from rows `x` [R, W]. The largest logit of each row
    must be 0."""
    weights = weights_of(x)
    shares = [[2.0 ** -min(max(mu_of(row), -_MOST), _MOST)] for row in rows]
    edge = upload_list(shares, torch.float64, x.device) * totals(weights).unsqueeze(1)
    best = x.argmax(1, keepdim=True)
    goes = (weights.double() < edge).scatter_(1, best, False)
    x.masked_fill_(goes, _NEVER)


def next_mus(x: torch.Tensor, tokens: torch.Tensor, rows: Sequence[SampleRow]) -> list[float]:
    """Return each row's next mu, after `tokens` [R] were sampled from the rows `x` [R, W]."""
    weights = weights_of(x)
    seen = (totals(weights) / weights.gather(1, tokens.unsqueeze(1)).squeeze(1).double()).log2().tolist()
    return [_next(row, surprise) for row, surprise in zip(rows, seen, strict=True)]


def _next(row: SampleRow, surprise: float) -> float:
    sampling = row.sampling
    if not math.isfinite(surprise):  # no token could be sampled
        return mu_of(row)
    return min(max(mu_of(row) - sampling.mirostat_eta * (surprise - sampling.mirostat_tau), -_MOST), _MOST)
