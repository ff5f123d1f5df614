"""Reference attention: slow, but simple enough to verify by reading. Each sequence's keys are gathered slot by slot
from its block table. The attention mask is boolean. Soft-capping and sinks are computed step by step in float64. Other
attention kernels are compared with this reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bridle.model.batch_inputs import PackedRow, PackedStep
from bridle.model.forward_context import AttentionOptions
from bridle.model.kv_cache import LayerCache


class ReferenceKernel:
    """Implements `AttentionKernel` directly by the definition of attention, one sequence at a time."""

    name = "reference"

    def __init__(self) -> None:
        self._step: PackedStep | None = None

    def begin(self, step: PackedStep) -> None:
        self._step = step

    def attend(self, query: Tensor, cache: LayerCache, options: AttentionOptions) -> Tensor:
        assert self._step is not None
        parts = [
            self._attend_row(query[row.offset : row.offset + row.length].transpose(0, 1), row, cache, options)
            for row in self._step.rows
        ]
        return torch.cat(parts).to(query.dtype)  # [T, Hq, Dv]

    def _attend_row(self, query: Tensor, row: PackedRow, cache: LayerCache, options: AttentionOptions) -> Tensor:
        assert self._step is not None
        size = self._step.block_size
        slots = [row.mirror.blocks[p // size] * size + p % size for p in range(row.context)]
        index = torch.tensor(slots, device=query.device)
        group = query.shape[0] // cache.keys.shape[1]
        keys, values = cache.gather(index, torch.float32)
        keys = keys[0].repeat_interleave(group, 0).double()  # [Hq, L, D]
        values = values[0].repeat_interleave(group, 0).double()  # [Hq, L, Dv]
        scores = query.double() @ keys.transpose(1, 2) * options.scaling  # [Hq, n, L]
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        scores = scores.masked_fill(~_visible(row, options.window, query.device), float("-inf"))
        weights = _softmax_with_sinks(scores, options.sinks)
        return (weights @ values).transpose(0, 1)  # [n, Hq, Dv]


def _visible(row: PackedRow, window: int | None, device: torch.device) -> Tensor:
    """Return a mask [n, L] of the positions that each of the row's tokens attends to."""
    own = torch.arange(row.start, row.context, device=device)[:, None]
    other = torch.arange(row.context, device=device)[None, :]
    seen = other <= own
    if window is not None:
        seen &= own - other < window
    for low, high in row.mutual:
        seen |= (own >= low) & (own < high) & (other >= low) & (other < high)
    return seen


def _softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return torch.softmax(scores, -1)
    column = sinks.double()[:, None, None].expand(*scores.shape[:2], 1)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
