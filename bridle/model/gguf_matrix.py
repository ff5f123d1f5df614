"""A matrix of a GGUF file as a quantized layer: in the file's blocks if kernels support their type, else in 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bridle.cpu_kernels.ggml import TYPES
from bridle.cpu_kernels.linear import QuantizedLinear
from bridle.gguf.dequantize import decode_blocks, exact_q8_0

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def packed_matrix(
    kind: str, rows: Bytes, shape: tuple[int, int], bias: Tensor | None, dtype: torch.dtype
) -> QuantizedLinear:
    """Return a layer of `rows` [out, bytes] in blocks of type `kind`, which encode a matrix of `shape` (out, in). Types
    without kernels are converted to 8 bits, without loss if possible."""
    if kind in TYPES:
        return QuantizedLinear.from_ggml(kind, rows, shape, bias, dtype)
    blocks = torch.from_numpy(rows)
    exact = exact_q8_0(kind, blocks)
    if exact is not None:
        return QuantizedLinear.from_ggml("Q8_0", exact.numpy(), shape, bias, dtype)
    return QuantizedLinear.from_float(decode_blocks(kind, blocks).to(dtype), "Q8_0", bias)


class ReorderedInputs(nn.Module):
    """A quantized layer whose columns are in another order than its inputs. A block holds neighbouring columns of a
    row, so columns cannot be reordered inside the blocks."""

    def __init__(self, linear: QuantizedLinear, order: Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.inputs: Tensor
        self.register_buffer("inputs", order.argsort(), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.linear(rows[..., self.inputs])  # type: ignore[no-any-return]

    def prepare(self) -> bool:
        return self.linear.prepare()
