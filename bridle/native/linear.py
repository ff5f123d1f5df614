"""Linear layers over quantized weights: groups of inputs with scales of their own, as GGUF files have them.

`QuantizedLinear` is made of stored blocks or of floating-point weights, and stands where an `nn.Linear` stood.
In plain torch it dequantizes its weight in each call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from bridle.native.ggml import BlockType, block_type, check_blocks, dequantize, quantize

#: What `from_float` can make.
FORMS = ("Q8_0", "Q4_0")


class QuantizedLinear(nn.Module):
    """A linear layer whose weight is kept in blocks of one of the types of `bridle.native.ggml`."""

    blocks: Tensor

    def __init__(
        self, kind: BlockType, blocks: Tensor, shape: tuple[int, int], bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        check_blocks(kind, blocks, shape)
        self.kind = kind
        self.out_features, self.in_features = shape
        self.dtype = dtype
        self.register_buffer("blocks", blocks, persistent=False)  # [out, bytes]
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(dtype), requires_grad=False)

    @classmethod
    def from_ggml(
        cls,
        type_name: str,
        blocks: np.ndarray[Any, np.dtype[np.uint8]],  # [out, bytes per row]
        shape: tuple[int, int],
        bias: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> QuantizedLinear:
        """Of blocks as they are stored, for a matrix of `shape` (out, in). They are copied."""
        return cls(block_type(type_name), torch.from_numpy(np.array(blocks, copy=True)), shape, bias, dtype)

    @classmethod
    def from_float(cls, weight: Tensor, form: str, bias: Tensor | None = None) -> QuantizedLinear:
        """Of a weight [out, in] in floating point, rounded to the nearest blocks of `form`."""
        kind = block_type(form)
        return cls(kind, quantize(kind, weight), (weight.shape[0], weight.shape[1]), bias, weight.dtype)

    @property
    def weight(self) -> Tensor:
        """[out, in] in floating point, as the blocks stand for it."""
        return dequantize(self.kind, self.blocks).to(self.dtype)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return functional.linear(rows, self.weight.to(rows.dtype), self.bias)

    def extra_repr(self) -> str:
        shape = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{shape}, bias={self.bias is not None}, type={self.kind.name}"
