"""The sampling step: one uniform random number per row selects a token by the cumulative weights in order of token
id."""

from __future__ import annotations

import torch

from bridle.cpu_kernels.library import sampling_kernels
from bridle.model.sampling.fixed_point_probs import chunk_sums, chunks, weights_of
from bridle.model.sampling.rows import CHUNK


def draw(shifted: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token [R] from each row of `shifted` [R, W], which are logits minus the row's largest logit. `uniform`
    [R] are random numbers in [0, 1), float64. Also return the totals of the rows' weights [R, 1]. A token with the
    logit -inf is never sampled. Rows of NaN give an arbitrary index."""
    found = sampling_kernels(shifted)
    if found is None:
        return draw_by_torch(shifted, uniform)
    num_rows = shifted.shape[0]
    return found.draw(shifted, range(num_rows), shifted.new_zeros(num_rows), shifted.new_ones(num_rows), uniform)


def draw_by_torch(shifted: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same as `draw` in plain torch, on any device."""
    weights = weights_of(shifted)
    sums = chunk_sums(weights)  # [R, W / CHUNK]
    running = sums.cumsum(1)
    total = running[:, -1:]
    target = (uniform.unsqueeze(1) * total).floor_().minimum(total - 1)
    chunk = torch.searchsorted(running, target, right=True).clamp_(max=sums.shape[1] - 1)  # [R, 1]
    before = running.gather(1, chunk) - sums.gather(1, chunk)
    index = chunk.unsqueeze(2).expand(-1, 1, CHUNK)
    inside = chunks(weights).gather(1, index).squeeze(1).double().cumsum_(1)  # [R, CHUNK]
    offset = (inside <= target - before).sum(1).clamp_(max=CHUNK - 1)
    return chunk.squeeze(1) * CHUNK + offset, total
