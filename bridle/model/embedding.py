"""An embedding that keeps its rows packed, and decodes only those that are asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bridle.gguf.dequantize import decode_blocks


class QuantizedEmbedding(nn.Module):
    """Replaces `original`, an `nn.Embedding` or a subclass of it that scales its rows."""

    blocks: Tensor
    scale: Tensor | None

    def __init__(self, kind: str, blocks: Tensor, original: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.dtype = kind, dtype
        self.num_embeddings, self.embedding_dim = original.num_embeddings, original.embedding_dim
        self.register_buffer("blocks", blocks, persistent=False)  # [V, bytes]
        scale = getattr(original, "embed_scale", None)
        self.register_buffer("scale", None if scale is None else scale.detach().to(dtype), persistent=False)

    @property
    def weight(self) -> Tensor:
        """All rows, [V, hidden], decoded anew in each call."""
        return decode_blocks(self.kind, self.blocks).to(self.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., hidden]"""
        rows = decode_blocks(self.kind, self.blocks[ids.reshape(-1)]).to(self.dtype)
        if self.scale is not None:
            rows *= self.scale
        return rows.view(*ids.shape, -1)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, type={self.kind}"
