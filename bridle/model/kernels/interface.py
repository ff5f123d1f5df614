"""The interface of attention kernels: begin a step, then attend once per layer.

Kernels only read the cache; the keys and values of new tokens are written before `attend` is called.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from bridle.model.batch_inputs import PackedStep
from bridle.model.forward_context import AttentionOptions
from bridle.model.kv_cache import LayerCache


class AttentionKernel(Protocol):
    """A kernel that computes attention over the paged cache."""

    name: str

    def begin(self, step: PackedStep) -> None:
        """Prepare the data that all layers of this step share."""

    def attend(self, query: Tensor, cache: LayerCache, options: AttentionOptions) -> Tensor:
        """Return attention of `query` [T, Hq, D] over each row's visible positions, [T, Hq, Dv]."""
        raise NotImplementedError
