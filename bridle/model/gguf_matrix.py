"""Makes a quantized layer from a matrix of a GGUF file. The layer keeps the file's blocks if kernels support their
type, and has 8 bits otherwise."""

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
    """Return a layer for a matrix of `shape` (out, in), whose `rows` [out, bytes] are blocks of type `kind`. Types that
    kernels do not support are converted to 8 bits, without loss if possible."""
    if kind in TYPES:
        return QuantizedLinear.from_ggml(kind, rows, shape, bias, dtype)
    blocks = torch.from_numpy(rows)
    exact = exact_q8_0(kind, blocks)
    if exact is not None:
        return QuantizedLinear.from_ggml("Q8_0", exact.numpy(), shape, bias, dtype)
    return QuantizedLinear.from_float(decode_blocks(kind, blocks).to(dtype), "Q8_0", bias)


class ReorderedInputs(nn.Module):
    """A quantized layer that reorders its inputs to the order of its weight's columns, which differs in the file. The
    columns cannot be reordered instead, because each quantized block holds neighbouring columns."""

    def __init__(self, linear: QuantizedLinear, order: Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.inputs: Tensor
        self.register_buffer("inputs", order.argsort(), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.linear(rows[..., self.inputs])  # type: ignore[no-any-return]

    def prepare(self) -> bool:
        return self.linear.prepare()
