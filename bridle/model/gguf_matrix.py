"""A matrix of a GGUF file as a quantized layer: in its own blocks where there are kernels for them, else in 8 bits."""

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
    """A layer of `rows` [out, bytes] in blocks of type `kind`, which stand for a matrix of `shape` (out, in). Types
    without kernels are brought to 8 bits, without loss where that can be."""
    if kind in TYPES:
        return QuantizedLinear.from_ggml(kind, rows, shape, bias, dtype)
    blocks = torch.from_numpy(rows)
    exact = exact_q8_0(kind, blocks)
    if exact is not None:
        return QuantizedLinear.from_ggml("Q8_0", exact.numpy(), shape, bias, dtype)
    return QuantizedLinear.from_float(decode_blocks(kind, blocks).to(dtype), "Q8_0", bias)


class ReorderedInputs(nn.Module):
    """A quantized layer whose columns are in another order than its inputs. Blocks lie along a row, so columns
    cannot change places in them."""

    def __init__(self, linear: QuantizedLinear, order: Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.inputs: Tensor
        self.register_buffer("inputs", order.argsort(), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.linear(rows[..., self.inputs])  # type: ignore[no-any-return]

    def prepare(self) -> bool:
        return self.linear.prepare()
