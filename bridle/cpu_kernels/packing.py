"""The order of weights that the kernels need: panels of as many outputs as a vector has lanes, four inputs side by
side.

A panel holds its blocks of 32 inputs one after the other. Within a block come vectors `[lanes, 4]` of bytes, vector g
with inputs 4 g to 4 g + 3. Below 8 bits a vector holds two of them, g in the low halves of bytes and g + 4 in the high
ones; fifth bits follow in one vector (bit g for input group g), fifth and sixth in two. Scales lie apart, also by
panels. Outputs are filled up to whole panels, inputs to whole blocks. Panels of float32 are vectors of lanes, one for
each input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bridle.cpu_kernels.ggml import BlockType, SplitBlocks
from bridle.cpu_kernels.huge_pages import alloc_huge_pages

BLOCK = 32
#: Numbers of the kinds in sources/linear.h.
KINDS = {"int8": 0, "Q8_0": 1, "Q4_0": 2, "Q4_K": 3, "Q5_K": 4, "Q6_K": 5, "float32": 6}


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix in the order of the kernels. `given` is the number of real inputs, `inputs` that with padding."""

    kind: str
    weights: Tensor  # uint8, flat
    scales: Tensor  # uint8, flat
    outputs: int
    inputs: int
    given: int


def pack_int8(quantized: Tensor, scale: Tensor, lanes: int, zero: int) -> PackedMatrix:
    """Integers [out, in] with a float scale per output; `zero` is what the kernels want added to them."""
    num_outputs, given = quantized.shape
    inputs, panels = -(-given // BLOCK) * BLOCK, -(-num_outputs // lanes)
    full = quantized
    if full.shape != (panels * lanes, inputs):
        full = torch.zeros(panels * lanes, inputs, dtype=torch.int8)
        full[:num_outputs, :given] = quantized
    # Four inputs at a time, as one number: they are moved several times as fast as bytes are.
    if full.storage_offset() % 4:
        full = full.clone()
    fours = full.contiguous().view(torch.int32).view(panels, lanes, inputs // 4)
    weights = _flat(fours.transpose(1, 2))
    if zero:
        weights.bitwise_xor_(zero)  # + 128 where it is 128
    scales = torch.zeros(panels * lanes, dtype=torch.float32)
    scales[:num_outputs] = scale
    return PackedMatrix("int8", weights, _flat(scales), num_outputs, inputs, given)


def pack_float32(weight: Tensor, lanes: int) -> PackedMatrix:
    """Numbers [out, in] as they are."""
    num_outputs, given = weight.shape
    full = _rows(weight.detach().float(), _up(num_outputs, lanes) - num_outputs)
    weights = full.view(-1, lanes, given).transpose(1, 2)  # [panels, in, lanes]
    return PackedMatrix("float32", _flat(weights), torch.empty(0, dtype=torch.uint8), num_outputs, given, given)


def pack_blocks(kind: BlockType, split: SplitBlocks, lanes: int, zero: int) -> PackedMatrix:
    """Blocks taken apart, for kernels that want `zero` added to 8-bit weights."""
    num_outputs, inputs = split.integers.shape
    missing = _up(num_outputs, lanes) - num_outputs
    integers = split.integers ^ (128 - zero) if kind.bits == 8 else split.integers
    groups = _rows(integers, missing).view(-1, lanes, inputs // BLOCK, 8, 4)  # [panels, lanes, blocks, g, 4]
    weights = torch.cat(_vectors(groups, kind.bits), 3).permute(0, 2, 3, 1, 4)  # [panels, blocks, vectors, lanes, 4]
    scales = _scales(split, lanes, missing)
    return PackedMatrix(kind.name, _flat(weights), _flat(scales), num_outputs, inputs, inputs)


def unpack_int8(packed: PackedMatrix, lanes: int, zero: int) -> tuple[Tensor, Tensor]:
    """The integers [out, in] and scales [out] that `pack_int8` was given."""
    full = packed.weights.view(-1, packed.inputs // 4, lanes, 4).transpose(1, 2).reshape(-1, packed.inputs)
    integers = full[: packed.outputs, : packed.given] ^ zero
    return integers.contiguous().view(torch.int8), packed.scales.view(torch.float32)[: packed.outputs]


def unpack_float32(packed: PackedMatrix, lanes: int) -> Tensor:
    """The numbers that `pack_float32` was given."""
    full = packed.weights.view(torch.float32).view(-1, packed.inputs, lanes).transpose(1, 2)
    return full.reshape(-1, packed.inputs)[: packed.outputs]


def unpack_blocks(kind: BlockType, packed: PackedMatrix, lanes: int, zero: int) -> SplitBlocks:
    """The blocks that `pack_blocks` was given."""
    num_blocks = packed.inputs // BLOCK
    panels = packed.weights.view(-1, num_blocks, kind.bits, lanes, 4).permute(0, 3, 1, 2, 4)
    integers = _integers(panels, kind.bits).reshape(-1, packed.inputs)[: packed.outputs]
    if kind.bits == 8:
        integers = integers ^ (128 - zero)
    parts = _unpack_scales(kind, packed, lanes)
    return SplitBlocks(integers, parts["scale"], parts.get("factor"), parts.get("minimum"), parts.get("offset"))


def _integers(panels: Tensor, bits: int) -> Tensor:
    """[panels, lanes, blocks, vectors, 4] bytes -> [panels, lanes, blocks, 8, 4] integers"""
    if bits == 8:
        return panels
    first = panels[..., :4, :]
    low = torch.cat([first & 15, first >> 4], 3)
    if bits == 5:
        return low | torch.cat([(panels[..., 4:, :] >> g & 1) << 4 for g in range(8)], 3)
    if bits == 6:
        pairs = [(panels[..., 4 + g // 4 : 5 + g // 4, :] >> 2 * (g % 4) & 3) << 4 for g in range(8)]
        return low | torch.cat(pairs, 3)
    return low


def _unpack_scales(kind: BlockType, packed: PackedMatrix, lanes: int) -> dict[str, Tensor]:
    """The fields of a `SplitBlocks` that the kind has."""
    num_blocks = packed.inputs // kind.inputs
    block = packed.scales.view(-(-packed.outputs // lanes), num_blocks, -1)
    per_block = kind.inputs // kind.group
    found: dict[str, Tensor] = {}
    begin = 0
    for name, dtype, count in (
        ("scale", torch.float16, 1),
        ("minimum", torch.float16, int(kind.has_minimum)),
        ("factor", torch.uint8 if kind.has_minimum else torch.int8, per_block if kind.inputs > BLOCK else 0),
        ("offset", torch.uint8, per_block if kind.has_minimum else 0),
    ):
        if count:
            size = count * lanes * dtype.itemsize
            each = block[..., begin : begin + size].contiguous().view(dtype).view(*block.shape[:2], count, lanes)
            found[name] = each.permute(0, 3, 1, 2).reshape(-1, num_blocks * count)[: packed.outputs]
            begin += size
    return found


def _vectors(groups: Tensor, bits: int) -> list[Tensor]:
    """[panels, lanes, blocks, 8, 4] integers -> parts [panels, lanes, blocks, vectors, 4] of bytes"""
    if bits == 8:
        return [groups]
    low = groups & 15
    parts = [low[..., :4, :] | low[..., 4:, :] << 4]
    high = groups >> 4
    if bits == 5:
        parts.append(sum((high[..., g : g + 1, :] << g for g in range(1, 8)), high[..., :1, :]))
    elif bits == 6:
        halves = high.reshape(*high.shape[:3], 2, 4, 4)  # vector, group within it, input
        parts.append(halves[..., 0, :] | halves[..., 1, :] << 2 | halves[..., 2, :] << 4 | halves[..., 3, :] << 6)
    return parts


def _scales(split: SplitBlocks, lanes: int, missing: int) -> Tensor:
    """[panels, blocks, bytes]: scale, minimum, factors, offsets of each block, those that there are"""
    num_blocks = split.scale.shape[1]
    parts = []
    for tensor in (split.scale, split.minimum, split.factor, split.offset):
        if tensor is None:
            continue
        each = _rows(tensor, missing).view(-1, lanes, num_blocks, tensor.shape[1] // num_blocks)
        parts.append(each.permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2))  # [panels, blocks, n x lanes]
    return torch.cat(parts, 2)


def _rows(tensor: Tensor, missing: int) -> Tensor:
    """`tensor` with `missing` rows of zeros below."""
    return torch.cat([tensor, tensor.new_zeros(missing, tensor.shape[1])]) if missing else tensor


def _flat(tensor: Tensor) -> Tensor:
    """A copy of its bytes, in order, where it stays."""
    flat = alloc_huge_pages(tensor.numel() * tensor.element_size())
    flat.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return flat


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
