"""Linear layers with float32 weights, or with quantized weights whose groups of inputs have their own scales, as in
GGUF files.

`QuantizedLinear` is made from stored blocks or from floating-point weights, and replaces an `nn.Linear`. `prepare`
converts the weight to the order of the kernels. After `prepare`, input rows are rounded to 8 bits, with a scale per 32
inputs, and multiplied as integers. The result of an input row does not depend on other rows. Without kernels, plain
torch dequantizes the weight in each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from bridle.cpu_kernels import packing
from bridle.cpu_kernels.ggml import BlockType, block_type, check_blocks, dequantize, join_split, quantize
from bridle.cpu_kernels.kernels import MAX_INPUTS, Kernels, Matrix
from bridle.cpu_kernels.library import kernels

#: The forms that `from_float` can make.
FORMS = ("Q8_0", "Q4_0")


_in_floats: ContextVar[bool] = ContextVar("in_floats", default=False)


@contextmanager
def in_floats() -> Iterator[None]:
    """Inside the `with` block, quantized layers unpack their weights in each call and compute in floating point. Two
    implementations of a model then differ only by float rounding. Outside the `with` block, rounding rows to 8 bits
    could amplify the smallest difference between two implementations."""
    token = _in_floats.set(True)
    try:
        yield
    finally:
        _in_floats.reset(token)


def are_in_floats() -> bool:
    """Return whether the caller runs inside a `with in_floats()` block."""
    return _in_floats.get()


class NativeWeight:
    """A weight in the order of the kernels, with a method that multiplies rows by the weight."""

    def __init__(self, found: Kernels, packed: packing.PackedMatrix, bias: Tensor | None) -> None:
        self.kernels, self.packed = found, packed
        self.matrix: Matrix = found.matrix(packed, bias)

    def multiply(self, rows: Tensor) -> Tensor:
        """Multiply rows: [..., in] -> [..., out], in the type of `rows`"""
        flat = rows.reshape(-1, self.packed.given).float().contiguous()
        return self.kernels.linear(self.matrix, flat).to(rows.dtype).view(*rows.shape[:-1], self.packed.outputs)

    def integers(self) -> tuple[Tensor, Tensor]:
        """Return the integers and scales that were passed to `int8_weight`."""
        return packing.unpack_int8(self.packed, self.kernels.lanes, self.kernels.zero)


def int8_weight(quantized: Tensor, scale: Tensor, bias: Tensor | None) -> NativeWeight | None:
    """Return a weight for the kernels from integers [out, in] with a float scale per output; None if no kernels support
    it."""
    found = kernels()
    if found is None or quantized.device.type != "cpu" or quantized.shape[1] > MAX_INPUTS:
        return None
    return NativeWeight(found, packing.pack_int8(quantized, scale, found.lanes, found.zero), bias)


class FloatLinear(nn.Module):
    """An `nn.Linear` in float32 that gives the same bits for a row in any batch. Reading `weight` converts the weight
    back to its usual order."""

    def __init__(self, linear: nn.Linear, found: Kernels) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = packing.pack_float32(linear.weight, found.lanes)
        self.native = NativeWeight(found, packed, linear.bias)
        self.bias: nn.Parameter | None = linear.bias
        self.register_buffer("packed", packed.weights, persistent=False)

    @classmethod
    def from_packed(cls, native: NativeWeight, bias: Tensor | None) -> FloatLinear:
        """Make a layer from a weight that is already in the order of the kernels."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.in_features, made.out_features = native.packed.given, native.packed.outputs
        made.native = native
        made.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        made.register_buffer("packed", native.packed.weights, persistent=False)
        return made

    @staticmethod
    def kernels_for(linear: nn.Linear) -> Kernels | None:
        """Return the kernels that can compute `linear`, or None."""
        weight = linear.weight
        fits = weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.shape[1] <= MAX_INPUTS
        return kernels() if fits else None

    @property
    def weight(self) -> Tensor:
        return packing.unpack_float32(self.native.packed, self.native.kernels.lanes)

    def forward(self, rows: Tensor) -> Tensor:
        """Compute the layer: [..., in] -> [..., out]"""
        return self.native.multiply(rows)


class QuantizedLinear(nn.Module):
    """A linear layer whose weight stays in quantized blocks. `bridle.cpu_kernels.ggml` lists the block types.

    `blocks` holds the stored blocks; `prepare` replaces them with the weight in the order of the kernels.
    """

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
        self.native: NativeWeight | None = None

    @classmethod
    def from_ggml(
        cls,
        type_name: str,
        blocks: np.ndarray[Any, np.dtype[np.uint8]],  # [out, bytes per row]
        shape: tuple[int, int],
        bias: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> QuantizedLinear:
        """Make a layer from stored blocks that encode a matrix of `shape` (out, in)."""
        return cls(block_type(type_name), torch.from_numpy(np.ascontiguousarray(blocks)), shape, bias, dtype)

    @classmethod
    def from_float(cls, weight: Tensor, form: str, bias: Tensor | None = None) -> QuantizedLinear:
        """Make a layer from a floating-point weight [out, in], rounded to the nearest blocks of type `form`."""
        kind = block_type(form)
        return cls(kind, quantize(kind, weight), (weight.shape[0], weight.shape[1]), bias, weight.dtype)

    @classmethod
    def from_packed(
        cls, kind: BlockType, packed: packing.PackedMatrix, bias: Tensor | None, dtype: torch.dtype, found: Kernels
    ) -> QuantizedLinear:
        """Make a layer from a weight that is already in the order of the kernels."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.kind, made.dtype = kind, dtype
        made.out_features, made.in_features = packed.outputs, packed.given
        made.bias = None if bias is None else nn.Parameter(bias.detach().to(dtype), requires_grad=False)
        made._take(packed, found)
        return made

    def prepare(self) -> bool:
        """Convert the blocks to the order of the kernels, if the kernels support this layer. Return whether the kernels
        support it. Idempotent."""
        return prepare_side_by_side([self])

    def _take(self, packed: packing.PackedMatrix, found: Kernels) -> None:
        self.native = NativeWeight(found, packed, self.bias)
        self.register_buffer("blocks", packed.weights, persistent=False)
        self.register_buffer("scales", packed.scales, persistent=False)

    def rows(self, numbers: Tensor) -> Tensor:
        """Return the weight's rows with these indices [n], in floating point: [n, in]"""
        if self.native is None:
            return dequantize(self.kind, self.blocks[numbers]).to(self.dtype)
        found = self.native.kernels
        split = packing.unpack_rows(self.kind, self.native.packed, found.lanes, found.zero, numbers)
        return join_split(self.kind, split).to(self.dtype)

    @property
    def weight(self) -> Tensor:
        """Return the decoded weight, [out, in] in floating point."""
        if self.native is None:
            return dequantize(self.kind, self.blocks).to(self.dtype)
        split = packing.unpack_blocks(
            self.kind, self.native.packed, self.native.kernels.lanes, self.native.kernels.zero
        )
        return join_split(self.kind, split).to(self.dtype)

    def forward(self, rows: Tensor) -> Tensor:
        """Compute the layer: [..., in] -> [..., out]"""
        if self.native is not None and not are_in_floats():
            return self.native.multiply(rows)
        return functional.linear(rows, self.weight.to(rows.dtype), self.bias)


def prepare_side_by_side(layers: Sequence[QuantizedLinear]) -> bool:
    """Convert the weights of several layers to the order of the kernels. The layers must have the same inputs and block
    type. The converted weights are contiguous in memory, so that `join` copies nothing. Returns whether there are
    kernels for the layers."""
    found, first = kernels(), layers[0]
    if first.native is not None or found is None or first.in_features > MAX_INPUTS:
        return first.native is not None
    packed = packing.pack_side_by_side(first.kind, [layer.blocks for layer in layers], found.lanes, found.pack)
    for layer, own in zip(layers, packed, strict=True):
        layer._take(own, found)
    return True


def join(layers: Sequence[QuantizedLinear], bias: Tensor | None) -> QuantizedLinear | None:
    """Join layers with the same inputs into one; return None if their types differ, or their weights are not contiguous
    in memory."""
    first = layers[0]
    if len({(layer.kind, layer.native is None) for layer in layers}) > 1:
        return None
    if first.native is None:
        blocks = torch.cat([layer.blocks for layer in layers])
        shape = (sum(layer.out_features for layer in layers), first.in_features)
        return QuantizedLinear(first.kind, blocks, shape, bias, first.dtype)
    found = first.native.kernels
    packed = packing.joined([layer.native.packed for layer in layers if layer.native is not None], found.lanes)
    return None if packed is None else QuantizedLinear.from_packed(first.kind, packed, bias, first.dtype, found)
