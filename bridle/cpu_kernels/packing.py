"""The order in which the kernels read weights: panels of outputs, one output per lane of a vector. A panel holds its
blocks of 32 inputs one after the other. A block consists of vectors `[lanes, 4]` of bytes; vector g has inputs 4 g to 4
g + 3. If weights have fewer than 8 bits, a vector holds two input groups. The low four bits of each byte belong to
group g, the high four bits to group g + 4. Fifth bits of 5-bit weights follow in one vector (bit g for input group g);
fifth and sixth bits of 6-bit weights take two. Scales are stored separately, also by panels. Outputs are padded to
whole panels, and inputs to whole blocks. In float32, a panel has one vector of lanes for each input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from bridle.cpu_kernels.ggml import TYPES, BlockType, SplitBlocks, split_blocks
from bridle.cpu_kernels.huge_pages import alloc_huge_pages

BLOCK = 32
#: Names of the kinds, in the order of their codes in sources/linear.h.
_NAMES = ("int8", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "float32", "Q4_1", "Q5_0", "Q5_1")
KINDS = {name: number for number, name in enumerate(_NAMES)}


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix in the order of the kernels. `given` is the number of inputs without padding, `inputs` the number with
    padding."""

    kind: str
    weights: Tensor  # uint8, flat
    scales: Tensor  # uint8, flat
    outputs: int
    inputs: int
    given: int


def pack_int8(quantized: Tensor, scale: Tensor, lanes: int, zero: int) -> PackedMatrix:
    """Pack integers [out, in] with a float scale per output. The kernels expect integers with an offset, so `zero` is
    added to each integer."""
    num_outputs, given = quantized.shape
    inputs, panels = -(-given // BLOCK) * BLOCK, -(-num_outputs // lanes)
    full = quantized
    if full.shape != (panels * lanes, inputs):
        full = torch.zeros(panels * lanes, inputs, dtype=torch.int8)
        full[:num_outputs, :given] = quantized
    # Four inputs at a time, as one 32-bit number: this is several times as fast as moving bytes.
    if full.storage_offset() % 4:
        full = full.clone()
    fours = full.contiguous().view(torch.int32).view(panels, lanes, inputs // 4)
    weights = _flat(fours.transpose(1, 2))
    if zero:
        weights.bitwise_xor_(zero)  # adds 128 if `zero` is 128
    scales = torch.zeros(panels * lanes, dtype=torch.float32)
    scales[:num_outputs] = scale
    return PackedMatrix("int8", weights, _flat(scales), num_outputs, inputs, given)


def pack_float32(weight: Tensor, lanes: int) -> PackedMatrix:
    """Pack floats [out, in] without quantization."""
    num_outputs, given = weight.shape
    full = _rows(weight.detach().float(), _up(num_outputs, lanes) - num_outputs)
    weights = full.view(-1, lanes, given).transpose(1, 2)  # [panels, in, lanes]
    return PackedMatrix("float32", _flat(weights), torch.empty(0, dtype=torch.uint8), num_outputs, given, given)


#: Writes rows of blocks [out, bytes] of a kind in the order of the kernels, into memory for the weights and for the
#: scales.
Fill = Callable[[BlockType, Tensor, Tensor, Tensor], None]


def pack_blocks(kind: BlockType, blocks: Tensor, lanes: int, fill: Fill) -> PackedMatrix:
    """Pack rows of blocks [out, bytes]."""
    return pack_side_by_side(kind, [blocks], lanes, fill)[0]


def pack_side_by_side(kind: BlockType, parts: Sequence[Tensor], lanes: int, fill: Fill) -> list[PackedMatrix]:
    """Pack several matrices as `pack_blocks` does, into contiguous bytes."""
    inputs = parts[0].shape[1] // kind.num_bytes * kind.inputs
    sizes = [packed_sizes(kind.name, _up(part.shape[0], lanes), inputs) for part in parts]
    weights, scales = _side_by_side([size for size, _ in sizes]), _side_by_side([size for _, size in sizes])
    for part, own_weights, own_scales in zip(parts, weights, scales, strict=True):
        fill(kind, part, own_weights, own_scales)
    return [
        PackedMatrix(kind.name, own_weights, own_scales, part.shape[0], inputs, inputs)
        for part, own_weights, own_scales in zip(parts, weights, scales, strict=True)
    ]


def _side_by_side(sizes: Sequence[int]) -> list[Tensor]:
    """Return contiguous pieces of memory of `sizes` bytes each."""
    whole, ends = alloc_huge_pages(sum(sizes)), list(accumulate(sizes))
    return [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def plain_fill(lanes: int, zero: int) -> Fill:
    """Return an implementation of `Kernels.pack` in plain torch. `lanes` and `zero` are the values that the kernels
    use. The C packing function is ten times as fast; its results are compared with those of this function before
    use."""

    def fill(kind: BlockType, blocks: Tensor, weights: Tensor, scales: Tensor) -> None:
        split, missing = split_blocks(kind, blocks), _up(blocks.shape[0], lanes) - blocks.shape[0]
        weights.copy_(_weights(kind, split, lanes, zero, missing).flatten())
        scales.copy_(_scales(split, lanes, missing).flatten())

    return fill


def joined(parts: Sequence[PackedMatrix], lanes: int) -> PackedMatrix | None:
    """Join matrices of one kind into one. Return None if the matrices' bytes are not contiguous, or if a matrix before
    the last one has a partly filled panel."""
    first = parts[0]
    if any(part.outputs % lanes for part in parts[:-1]) or len({(part.kind, part.inputs) for part in parts}) > 1:
        return None
    weights = _run_of([part.weights for part in parts])
    scales = _run_of([part.scales for part in parts])
    if weights is None or scales is None:
        return None
    return PackedMatrix(first.kind, weights, scales, sum(p.outputs for p in parts), first.inputs, first.given)


def _run_of(parts: Sequence[Tensor]) -> Tensor | None:
    """Join views that follow one another in the same memory; return None for other views."""
    at = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != at or part.untyped_storage().data_ptr() != parts[0].untyped_storage().data_ptr():
            return None
        at += part.numel()
    return parts[0].as_strided((sum(part.numel() for part in parts),), (1,))


def packed_sizes(kind: str, outputs: int, inputs: int) -> tuple[int, int]:
    """Return the number of bytes that weights and scales take in whole panels."""
    if kind == "int8":
        return outputs * inputs, 4 * outputs
    if kind == "float32":
        return 4 * outputs * inputs, 0
    block = TYPES[kind]
    factors = 0 if block.inputs == BLOCK else 16
    per_block = factors + (4 if block.has_minimum else 2)
    return outputs * inputs * block.bits // 8, outputs * (inputs // block.inputs) * per_block


def unpack_int8(packed: PackedMatrix, lanes: int, zero: int) -> tuple[Tensor, Tensor]:
    """Return the integers [out, in] and scales [out] that were passed to `pack_int8`."""
    full = packed.weights.view(-1, packed.inputs // 4, lanes, 4).transpose(1, 2).reshape(-1, packed.inputs)
    integers = full[: packed.outputs, : packed.given] ^ zero
    return integers.contiguous().view(torch.int8), packed.scales.view(torch.float32)[: packed.outputs]


def unpack_float32(packed: PackedMatrix, lanes: int) -> Tensor:
    """Return the floats that were passed to `pack_float32`."""
    full = packed.weights.view(torch.float32).view(-1, packed.inputs, lanes).transpose(1, 2)
    return full.reshape(-1, packed.inputs)[: packed.outputs]


def unpack_blocks(kind: BlockType, packed: PackedMatrix, lanes: int, zero: int) -> SplitBlocks:
    """Return the blocks that were passed to `pack_blocks`, separated into integers and scales."""
    num_blocks = packed.inputs // BLOCK
    panels = packed.weights.view(-1, num_blocks, kind.bits, lanes, 4).permute(0, 3, 1, 2, 4)
    integers = _integers(panels, kind.bits).reshape(-1, packed.inputs)[: packed.outputs]
    fields = _fields(kind, _scale_bytes(kind, packed, lanes), lanes)
    rows = {name: each.permute(0, 3, 1, 2).flatten(0, 1).flatten(1)[: packed.outputs] for name, each in fields.items()}
    return SplitBlocks(_unsigned(kind, integers, zero), **rows)


def unpack_rows(kind: BlockType, packed: PackedMatrix, lanes: int, zero: int, rows: Tensor) -> SplitBlocks:
    """Return the blocks of the rows with indices `rows` [n], separated into integers and scales."""
    panel, lane = rows // lanes, rows % lanes
    vectors = packed.weights.view(-1, packed.inputs // BLOCK, kind.bits, lanes, 4)[panel, :, :, lane]
    integers = _integers(vectors.unsqueeze(1), kind.bits).reshape(-1, packed.inputs)
    fields = _fields(kind, _scale_bytes(kind, packed, lanes)[panel], lanes)
    each = torch.arange(len(rows))
    return SplitBlocks(
        _unsigned(kind, integers, zero), **{name: field[each, :, :, lane].flatten(1) for name, field in fields.items()}
    )


def _unsigned(kind: BlockType, integers: Tensor, zero: int) -> Tensor:
    return integers ^ (128 - zero) if kind.bits == 8 else integers


def _integers(panels: Tensor, bits: int) -> Tensor:
    """Unpack bytes [panels, lanes, blocks, vectors, 4] to integers [panels, lanes, blocks, 8, 4]."""
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


def _scale_bytes(kind: BlockType, packed: PackedMatrix, lanes: int) -> Tensor:
    """Return the scales as [panels, blocks, bytes]."""
    return packed.scales.view(-(-packed.outputs // lanes), packed.inputs // kind.inputs, -1)


def _fields(kind: BlockType, scales: Tensor, lanes: int) -> dict[str, Tensor]:
    """Return the fields of `SplitBlocks` that this block type has, except the integers, each as [panels, blocks, count,
    lanes]."""
    per_block = kind.inputs // kind.group
    found: dict[str, Tensor] = {}
    begin = 0
    for name, dtype, count in (
        ("scale", torch.float16, 1),
        ("minimum", torch.float16, int(kind.has_minimum)),
        ("factor", torch.uint8 if kind.has_minimum else torch.int8, per_block if kind.inputs > BLOCK else 0),
        ("offset", torch.uint8, per_block if kind.has_offset else 0),
    ):
        if count:
            size = count * lanes * dtype.itemsize
            part = scales[..., begin : begin + size].contiguous().view(dtype)
            found[name] = part.view(*scales.shape[:2], count, lanes)
            begin += size
    return found


def _weights(kind: BlockType, split: SplitBlocks, lanes: int, zero: int, missing: int) -> Tensor:
    """Return the packed integers as [panels, bytes]."""
    integers = _rows(_unsigned(kind, split.integers, zero), missing)
    groups = integers.view(-1, lanes, integers.shape[1] // BLOCK, 8, 4)  # [panels, lanes, blocks, g, 4]
    return torch.cat(_vectors(groups, kind.bits), 3).permute(0, 2, 3, 1, 4).flatten(1)


def _vectors(groups: Tensor, bits: int) -> list[Tensor]:
    """Pack integers [panels, lanes, blocks, 8, 4] into bytes: a list of parts [panels, lanes, blocks, vectors, 4]."""
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
    """Return the bytes [panels, blocks, bytes] of each block's scale, minimum, factors and offsets, as far as the type
    has them."""
    num_blocks = split.scale.shape[1]
    parts = []
    for tensor in (split.scale, split.minimum, split.factor, split.offset):
        if tensor is None:
            continue
        each = _rows(tensor, missing).view(-1, lanes, num_blocks, tensor.shape[1] // num_blocks)
        parts.append(each.permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2))  # [panels, blocks, n x lanes]
    return torch.cat(parts, 2)


def _rows(tensor: Tensor, missing: int) -> Tensor:
    """Append `missing` rows of zeros to `tensor`."""
    return torch.cat([tensor, tensor.new_zeros(missing, tensor.shape[1])]) if missing else tensor


def _flat(tensor: Tensor) -> Tensor:
    """Return a flat copy of the tensor's bytes in memory with huge pages."""
    flat = alloc_huge_pages(tensor.numel() * tensor.element_size())
    flat.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return flat


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
