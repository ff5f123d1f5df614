"""Quantized blocks of GGUF files: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K.

Each row of a weight consists of blocks, and each block has its own scales. `split_blocks` separates blocks into
integers and scales, without loss. `dequantize` decodes blocks to floating point, and `bridle.cpu_kernels.packing`
converts them to the order of the kernels. `quantize` writes only Q8_0 and Q4_0. This module reads no files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bridle.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class BlockType:
    """Block layout of a quantized type. A block stores `inputs` values in `num_bytes` bytes, as integers of `bits` bits
    minus `zero`. Each group of `group` inputs has one scale. K-quants have 256 `inputs`, and integer scales for each
    group."""

    name: str
    inputs: int
    num_bytes: int
    bits: int
    zero: int
    group: int

    @property
    def has_minimum(self) -> bool:
        return self.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")

    @property
    def has_offset(self) -> bool:
        """Return whether each group has its own integer factor for the block's minimum."""
        return self.has_minimum and self.inputs > self.group

    def row_bytes(self, num_inputs: int) -> int:
        return num_inputs // self.inputs * self.num_bytes


#: Maximum number of values that are quantized at once.
_MAX_NUMBERS = 1 << 22

TYPES = {
    kind.name: kind
    for kind in (
        BlockType("Q8_0", 32, 34, 8, 128, 32),
        BlockType("Q4_0", 32, 18, 4, 8, 32),
        BlockType("Q4_1", 32, 20, 4, 0, 32),
        BlockType("Q5_0", 32, 22, 5, 16, 32),
        BlockType("Q5_1", 32, 24, 5, 0, 32),
        BlockType("Q4_K", 256, 144, 4, 0, 32),
        BlockType("Q5_K", 256, 176, 5, 0, 32),
        BlockType("Q6_K", 256, 210, 6, 32, 16),
    )
}


@dataclass(frozen=True, slots=True)
class SplitBlocks:
    """Separated blocks: `weight = scale * factor * (integers - zero) - minimum * offset`.

    `scale` and `minimum` are half-precision, one per block; `factor` and `offset` are small integers, one per group. If
    a type has no `factor` or `offset`, the field is None, which means 1.
    """

    integers: Tensor  # [out, in] uint8
    scale: Tensor  # [out, in / inputs] float16
    factor: Tensor | None = None  # [out, in / group] int8 or uint8
    minimum: Tensor | None = None  # [out, in / inputs] float16
    offset: Tensor | None = None  # [out, in / group] uint8


def block_type(name: str) -> BlockType:
    """Return the type called `name`. Raises `InvalidRequest` for an unknown type."""
    if name not in TYPES:
        raise InvalidRequest(f"quantization type is {name!r}; must be one of {', '.join(TYPES)}", "quantization")
    return TYPES[name]


def check_blocks(kind: BlockType, blocks: Tensor, shape: tuple[int, int]) -> None:
    """Raise `InvalidRequest` if `blocks` are not the bytes of a matrix of `shape` [out, in]."""
    num_outputs, num_inputs = shape
    if num_outputs < 1 or num_inputs < 1 or num_inputs % kind.inputs:
        raise InvalidRequest(
            f"a matrix of shape {shape} cannot be {kind.name}: its row length is not a multiple of {kind.inputs}",
            "quantization",
        )
    wanted = (num_outputs, kind.row_bytes(num_inputs))
    if blocks.dtype is not torch.uint8 or tuple(blocks.shape) != wanted:
        raise InvalidRequest(
            f"{kind.name} blocks have shape {tuple(blocks.shape)} and type {blocks.dtype}; a matrix of {shape} needs "
            f"{wanted} of torch.uint8",
            "quantization",
        )


def split_blocks(kind: BlockType, blocks: Tensor) -> SplitBlocks:
    """Separate rows of blocks [out, bytes] into integers and scales."""
    parts = blocks.reshape(blocks.shape[0], -1, kind.num_bytes)  # [out, blocks, bytes]
    return _SPLITTERS[kind.name](parts)


def dequantize(kind: BlockType, blocks: Tensor) -> Tensor:
    """Decode rows of blocks [out, bytes] to float32 [out, in]."""
    return join_split(kind, split_blocks(kind, blocks))


def join_split(kind: BlockType, split: SplitBlocks) -> Tensor:
    """Convert separated blocks to float32 [out, in]."""
    rows = split.integers.shape[0]
    scale = split.scale.float().unsqueeze(-1)  # [out, blocks, 1]
    groups = split.integers.view(rows, split.scale.shape[1], -1, kind.group)  # [out, blocks, groups, group]
    if split.factor is not None:
        scale = scale * split.factor.view(rows, split.scale.shape[1], -1).float()  # [out, blocks, groups]
    weight = (groups.float() - kind.zero) * scale.unsqueeze(-1)
    if split.minimum is not None:
        lifted = split.minimum.float().unsqueeze(-1)
        if split.offset is not None:
            lifted = lifted * split.offset.view(rows, split.scale.shape[1], -1).float()
        weight -= lifted.unsqueeze(-1)
    return weight.view(rows, -1)


def quantize(kind: BlockType, weight: Tensor) -> Tensor:
    """Quantize float rows [out, in] to blocks [out, bytes], for Q8_0 and Q4_0."""
    if kind.name not in ("Q8_0", "Q4_0"):
        raise InvalidRequest(f"weights cannot be quantized to {kind.name}; use Q8_0 or Q4_0", "quantization")
    if weight.shape[1] % kind.group:
        raise InvalidRequest(f"row length is {weight.shape[1]}; must be a multiple of {kind.group}", "quantization")
    make = _to_q8 if kind.name == "Q8_0" else _to_q4
    parts = torch.split(
        weight.detach(), max(1, _MAX_NUMBERS // weight.shape[1])
    )  # in small parts, because float32 takes much memory
    return torch.cat([make(part.float().reshape(part.shape[0], -1, kind.group)).flatten(1) for part in parts])


def _to_q8(groups: Tensor) -> Tensor:
    scale = groups.abs().amax(-1, keepdim=True) / 127
    integers = torch.round(groups * _inverse(scale)).to(torch.int8)
    return torch.cat([scale.half().view(torch.uint8), integers.view(torch.uint8)], -1)


def _to_q4(groups: Tensor) -> Tensor:
    """Quantize groups of values to 4 bits. In each group, the value with the largest absolute value becomes -8."""
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = extreme / -8
    nibbles = torch.floor(groups * _inverse(scale) + 8.5).clamp_(0, 15).to(torch.uint8)
    return torch.cat([scale.half().view(torch.uint8), nibbles[..., :16] | (nibbles[..., 16:] << 4)], -1)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def _half(parts: Tensor, begin: int) -> Tensor:
    """Return the half-precision number at byte `begin` of each block: [out, blocks]."""
    return parts[..., begin : begin + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(parts: Tensor) -> Tensor:
    """Split bytes into 4-bit values: [..., n] -> [..., 2 n]. The low four bits of all bytes come first, then the high
    four bits."""
    return torch.cat([parts & 15, parts >> 4], -1)


def _cut(parts: Tensor, *sizes: int) -> Tensor:
    """Split the last dimension: [..., n] -> [..., *sizes]."""
    return parts.reshape(*parts.shape[:-1], *sizes)


def _split_q8_0(parts: Tensor) -> SplitBlocks:
    return SplitBlocks((parts[..., 2:] ^ 128).flatten(1), _half(parts, 0))


def _split_q4_0(parts: Tensor) -> SplitBlocks:
    return SplitBlocks(_nibbles(parts[..., 2:]).flatten(1), _half(parts, 0))


def _split_q4_1(parts: Tensor) -> SplitBlocks:
    return SplitBlocks(_nibbles(parts[..., 4:]).flatten(1), _half(parts, 0), minimum=-_half(parts, 2))


def _split_q5_0(parts: Tensor) -> SplitBlocks:
    return SplitBlocks(_five_bits(parts[..., 2:6], parts[..., 6:]), _half(parts, 0))


def _split_q5_1(parts: Tensor) -> SplitBlocks:
    return SplitBlocks(_five_bits(parts[..., 4:8], parts[..., 8:]), _half(parts, 0), minimum=-_half(parts, 2))


def _five_bits(mask: Tensor, low: Tensor) -> Tensor:
    """Join the fifth bits [out, blocks, 4] and the low four bits [out, blocks, 16] of integers: -> [out, in]."""
    fifth = (mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)  # [out, blocks, 32]
    return (_nibbles(low) | fifth << 4).flatten(1)


def _split_q4_k(parts: Tensor) -> SplitBlocks:
    factor, offset = _six_bit_scales(parts[..., 4:16])
    quarters = _cut(parts[..., 16:], 4, 32)  # two groups each
    return SplitBlocks(_nibbles(quarters).flatten(1), _half(parts, 0), factor, _half(parts, 2), offset)


def _split_q5_k(parts: Tensor) -> SplitBlocks:
    factor, offset = _six_bit_scales(parts[..., 4:16])
    high = parts[..., 16:48].unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1)  # [out, blocks, 8, 32]
    low = _nibbles(_cut(parts[..., 48:], 4, 32)).reshape(high.shape)
    return SplitBlocks((low | (high & 1) << 4).flatten(1), _half(parts, 0), factor, _half(parts, 2), offset)


def _split_q6_k(parts: Tensor) -> SplitBlocks:
    low = _nibbles(_cut(parts[..., :128], 2, 64))  # [out, blocks, 2, 128]
    pairs = _cut(parts[..., 128:192], 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1)
    high = (pairs & 3).flatten(-2)  # [out, blocks, 2, 128]
    factor = parts[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return SplitBlocks((low | high << 4).flatten(1), _half(parts, 208), factor)


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the factors and the offsets of groups, six bits each: [out, blocks, 12] -> 2 x [out, groups]. Twelve bytes
    hold eight factors and eight offsets."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    factor = torch.cat([first & 63, (third & 15) | (first >> 6) << 4], -1)
    offset = torch.cat([second & 63, (third >> 4) | (second >> 6) << 4], -1)
    return factor.flatten(1), offset.flatten(1)


_SPLITTERS: dict[str, Callable[[Tensor], SplitBlocks]] = {
    "Q8_0": _split_q8_0,
    "Q4_0": _split_q4_0,
    "Q4_1": _split_q4_1,
    "Q5_0": _split_q5_0,
    "Q5_1": _split_q5_1,
    "Q4_K": _split_q4_k,
    "Q5_K": _split_q5_k,
    "Q6_K": _split_q6_k,
}
