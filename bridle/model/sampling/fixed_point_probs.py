"""Represents probabilities as integers (weights). All computations that decide the sampled token use integer weights.

The weight of a token is exp(logit - largest logit), cut to a multiple of 2**-34 and counted in that unit. A sum of up
to 2**19 weights is exact in float64, in any order of addition. So sums of weights do not depend on how a kernel splits
a row, on the row's padding, or on other rows. A token that is 2**34 times less likely than the best token has weight 0.
"""

from __future__ import annotations

import torch

from bridle.cpu_kernels.library import sampling_kernels
from bridle.model.sampling.rows import CHUNK

UNIT = 2.0**34
#: Values below this have weight 0, since exp(-24) is less than a unit. Raising such values to this one changes no
#: weight, and avoids infinities of masked tokens, for which exp takes several times as long.
_FLOOR = -24.0


def weights_of(shifted: torch.Tensor) -> torch.Tensor:
    """Return the weights of `shifted` [..., W], which are logits minus the row's largest logit. Weights are integers of
    at most `UNIT`, as float32."""
    return _weigh(shifted.clamp(min=_FLOOR))


def _weigh(clamped: torch.Tensor) -> torch.Tensor:
    return clamped.exp_().mul_(UNIT).floor_()


def chunks(weights: torch.Tensor) -> torch.Tensor:
    """Return a view of `weights` [R, W] by chunks: [R, W / CHUNK, CHUNK]. W must be a multiple of `CHUNK`."""
    return weights.reshape(weights.shape[0], weights.shape[1] // CHUNK, CHUNK)


def chunk_sums(weights: torch.Tensor) -> torch.Tensor:
    """Return the sums over the chunks of `weights` [R, W]: float64 [R, W / CHUNK]."""
    return chunks(weights).sum(-1, dtype=torch.float64)


def totals(weights: torch.Tensor) -> torch.Tensor:
    """Return the row sums of `weights` [R, W]: float64 [R]."""
    return chunk_sums(weights).sum(-1)


def take_totals(work: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return the `totals` of `work` [R, W], whose largest values are `largest` [R, 1]: float64 [R, 1]. The call
    overwrites `work`, because memory for another matrix costs more than the arithmetic."""
    found = sampling_kernels(work)
    if found is not None:
        return found.totals(work, largest.contiguous())
    return totals(_weigh(work.sub_(largest).clamp_(min=_FLOOR))).unsqueeze(-1)
