"""Attention for models in which the tokens of an image attend to each other in both directions. A causal kernel
computes all batch rows. Plain torch then computes the rows that have images again, and replaces their results. So a row
without images has the same result whatever other rows are in the step.
"""

from __future__ import annotations

from torch import Tensor

from bridle.model.batch_inputs import PackedStep
from bridle.model.forward_context import AttentionOptions
from bridle.model.kernels.cpu import CpuKernel
from bridle.model.kernels.interface import AttentionKernel
from bridle.model.kv_cache import LayerCache


class BidirectionalKernel:
    """The kernel `causal`, with corrected results for tokens that attend to later tokens. With `is_local`, tokens
    attend to later tokens only within the window of layers that have a sliding window."""

    name = "both ways"

    def __init__(self, causal: AttentionKernel, is_local: bool = False) -> None:
        knows_mutual = causal.name in ("cpu", "reference")  # these kernels support it, but only beyond windows
        self._causal = CpuKernel(is_local) if is_local and knows_mutual else causal
        self._plain = CpuKernel(is_local)
        self._has_mutual = False

    def begin(self, step: PackedStep) -> None:
        self._causal.begin(step)
        self._has_mutual = any(row.mutual for row in step.rows)
        if self._has_mutual:
            self._plain.begin(step)

    def attend(self, query: Tensor, cache: LayerCache, options: AttentionOptions) -> Tensor:
        out = self._causal.attend(query, cache, options)
        if self._has_mutual:
            self._plain.attend_both_ways(out, query, cache, options)
        return out
