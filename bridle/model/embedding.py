"""An embedding with quantized rows, which decodes only the rows that are looked up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bridle.cpu_kernels.linear import QuantizedLinear
from bridle.gguf.dequantize import decode_blocks


class QuantizedEmbedding(nn.Module):
    """Replaces `original`, an `nn.Embedding` or one of its subclasses that scales rows. The embedding's rows are blocks
    [V, bytes] of type `kind`, or come from an output head that shares the weight."""

    blocks: Tensor | None
    scale: Tensor | None

    def __init__(self, kind: str, rows: Tensor | QuantizedLinear, original: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.dtype = kind, dtype
        self.num_embeddings, self.embedding_dim = original.num_embeddings, original.embedding_dim
        self._head = (rows,) if isinstance(rows, QuantizedLinear) else None  # it is a part of the model by itself
        self.register_buffer("blocks", rows if isinstance(rows, Tensor) else None, persistent=False)
        scale = getattr(original, "embed_scale", None)
        self.register_buffer("scale", None if scale is None else scale.detach().to(dtype), persistent=False)

    @property
    def weight(self) -> Tensor:
        """Return all rows of the embedding, [V, hidden], which each call decodes again."""
        if self._head is not None:
            return self._head[0].weight
        assert self.blocks is not None
        return decode_blocks(self.kind, self.blocks).to(self.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings of ids: [...] -> [..., hidden]"""
        rows = self._rows(ids.reshape(-1))
        if self.scale is not None:
            rows *= self.scale
        return rows.view(*ids.shape, -1)

    def _rows(self, numbers: Tensor) -> Tensor:
        """Return the decoded rows: [n] -> [n, hidden]"""
        if self._head is not None:
            return self._head[0].rows(numbers)
        assert self.blocks is not None
        return decode_blocks(self.kind, self.blocks[numbers]).to(self.dtype)
