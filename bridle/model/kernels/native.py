"""Attention by the C kernels. One call computes all sequences of a step, and reads the blocks of the cache without
copies. Layers that the kernels do not support (wide or uneven heads, half precision) are computed in plain torch. A
token's result does not depend on other sequences in the batch, on the chunking of its prompt, or on the order of its
blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bridle.cpu_kernels.kernels import Kernels
from bridle.cpu_kernels.layers import KV_TYPES, AttentionRows, Heads, attend
from bridle.model.batch_inputs import PackedStep
from bridle.model.forward_context import AttentionOptions
from bridle.model.kernels.cpu import CpuKernel
from bridle.model.kv_cache import LayerCache


class NativeKernel(CpuKernel):
    """Implements `AttentionKernel` by the C kernels, with plain torch for layers that they do not support."""

    name = "native"

    def __init__(self, found: Kernels) -> None:
        super().__init__()
        self._found = found
        self._native_rows: dict[int, AttentionRows] = {}  # by the number of query heads per key head

    def begin(self, step: PackedStep) -> None:
        super().begin(step)
        self._native_rows.clear()

    def attend(self, query: Tensor, cache: LayerCache, options: AttentionOptions) -> Tensor:
        heads = Heads(query.shape[1], cache.keys.shape[1], query.shape[2])
        is_float = query.dtype is torch.float32 and cache.keys.dtype in KV_TYPES
        if not is_float or cache.values.shape[2] != heads.dim or not heads.fit(self._found.lanes):
            return super().attend(query, cache, options)
        rows = self._rows_for(heads.heads // heads.kv_heads, cache)
        return attend(self._found, query, cache.pool, rows, *options)

    def _rows_for(self, group: int, cache: LayerCache) -> AttentionRows:
        if group not in self._native_rows:
            assert self._step is not None
            self._native_rows[group] = native_rows(self._step, cache.keys.shape[0], self._found.queries // group)
        return self._native_rows[group]


def native_rows(step: PackedStep, num_slots: int, tokens_per_chunk: int) -> AttentionRows:
    """Return the batch rows of a step as an argument for the C kernels."""
    sequences = [(row.offset, row.length, row.context, row.spans) for row in step.rows]
    return AttentionRows(sequences, num_slots, tokens_per_chunk)
