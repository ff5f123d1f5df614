"""The two Triton kernels of `bridle.lora.fused`, which describes how they divide the work. Importing this module needs
Triton.

Pointers: `rows` [T, in], `hidden` [shares, T, ranks] float32, `out` [T, columns], `tiles` [tiles, 4]. An adapter's A is
stored as [rank, in] and each part's B as [columns, ranks]. Ranks and the offsets of A and B are multiples of 8. The
kernels declare this alignment to the compiler, which can then load 16 bytes at a time. With `is_wide`, products are in
float32 for any type. Triton's interpreter needs `is_wide`, because it stores bfloat16 values as integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers in a tile, and in a table's rows for a site and for a part.
TILE = tl.constexpr(4)
SITE = tl.constexpr(4)
PART = tl.constexpr(5)


@triton.jit(do_not_specialize=["site", "hidden_share_stride"])
def shrink(
    rows: tl.tensor,
    hidden: tl.tensor,
    tiles: tl.tensor,
    site: tl.tensor,
    num_inputs: tl.tensor,
    row_stride: tl.tensor,
    share: tl.tensor,
    hidden_share_stride: tl.tensor,
    hidden_stride: tl.tensor,
    block_rows: tl.constexpr,
    block_ranks: tl.constexpr,
    block_inputs: tl.constexpr,
    is_wide: tl.constexpr,
) -> None:
    """hidden[share, tile's rows, ranks] = rows @ A.T over one share of the inputs. Program axes: tiles, blocks of
    ranks, shares."""
    tile = tiles + tl.program_id(0) * TILE
    table = tl.load(tile + 3).to(tl.pointer_type(tl.int64))
    if site >= tl.load(table):
        return  # this site comes after the adapter's last one
    entry = table + 1 + site * SITE
    num_ranks = tl.load(entry + 1)
    first_rank = tl.program_id(1) * block_ranks
    if first_rank >= num_ranks:
        return  # another adapter of the step has a larger rank, or this adapter does not change this site

    row = tl.load(tile) + tl.arange(0, block_rows)
    is_row = row < tl.load(tile + 1)
    rank = first_rank + tl.arange(0, block_ranks)
    is_rank = rank < tl.multiple_of(num_ranks, 8)
    weights = tl.load(tile + 2).to(tl.pointer_type(rows.dtype.element_ty))
    a = tl.multiple_of(weights, 16) + tl.multiple_of(tl.load(entry), 8)

    begin = tl.program_id(2) * share
    sums = tl.zeros((block_rows, block_ranks), dtype=tl.float32)
    for offset in range(begin, tl.minimum(begin + share, num_inputs), block_inputs):
        index = offset + tl.arange(0, block_inputs)
        is_input = index < num_inputs
        x = tl.load(rows + row[:, None] * row_stride + index[None, :], is_row[:, None] & is_input[None, :], 0.0)
        w = tl.load(a + rank[None, :] * num_inputs + index[:, None], is_rank[None, :] & is_input[:, None], 0.0)
        if is_wide:
            x, w = x.to(tl.float32), w.to(tl.float32)
        sums = tl.dot(x, w, sums, input_precision="ieee")

    to = hidden + tl.program_id(2).to(tl.int64) * hidden_share_stride
    tl.store(to + row[:, None] * hidden_stride + rank[None, :], sums, is_row[:, None] & is_rank[None, :])


@triton.jit(do_not_specialize=["site", "num_shares", "hidden_share_stride"])
def expand(
    hidden: tl.tensor,
    out: tl.tensor,
    tiles: tl.tensor,
    site: tl.tensor,
    num_shares: tl.tensor,
    hidden_share_stride: tl.tensor,
    hidden_stride: tl.tensor,
    out_stride: tl.tensor,
    block_rows: tl.constexpr,
    block_ranks: tl.constexpr,
    block_columns: tl.constexpr,
    column_step: tl.constexpr,
    is_wide: tl.constexpr,
) -> None:
    """out[tile's rows, part's columns] += sum of hidden over shares @ B.T. Program axes: tiles, blocks of columns,
    parts."""
    tile = tiles + tl.program_id(0) * TILE
    table = tl.load(tile + 3).to(tl.pointer_type(tl.int64))
    if site >= tl.load(table):
        return
    entry = table + 1 + site * SITE
    if tl.program_id(2) >= tl.load(entry + 3):
        return  # the adapter has fewer parts here
    part = table + tl.load(entry + 2) + tl.program_id(2) * PART
    num_columns = tl.multiple_of(tl.load(part + 2), column_step)
    first_column = tl.program_id(1) * block_columns
    if first_column >= num_columns:
        return  # the part has fewer columns than the widest one

    row = tl.load(tile) + tl.arange(0, block_rows)
    is_row = row < tl.load(tile + 1)
    column = first_column + tl.arange(0, block_columns)
    is_column = column < num_columns
    num_ranks = tl.multiple_of(tl.load(part + 4), 8)
    weights = tl.load(tile + 2).to(tl.pointer_type(out.dtype.element_ty))
    b = tl.multiple_of(weights, 16) + tl.multiple_of(tl.load(part), 8)
    start = hidden + tl.multiple_of(tl.load(part + 3), 8) + row[:, None] * hidden_stride
    share_stride = hidden_share_stride.to(tl.int64)

    sums = tl.zeros((block_rows, block_columns), dtype=tl.float32)
    for first_rank in range(0, num_ranks, block_ranks):
        rank = first_rank + tl.arange(0, block_ranks)
        is_rank = rank < num_ranks
        h = tl.zeros((block_rows, block_ranks), dtype=tl.float32)
        for number in range(num_shares):
            h += tl.load(start + number * share_stride + rank[None, :], is_row[:, None] & is_rank[None, :], 0.0)
        w = tl.load(b + column[None, :] * num_ranks + rank[:, None], is_column[None, :] & is_rank[:, None], 0.0)
        h = h.to(w.dtype)
        if is_wide:
            h, w = h.to(tl.float32), w.to(tl.float32)
        sums = tl.dot(h, w, sums, input_precision="ieee")
    to = out + row[:, None] * out_stride + tl.multiple_of(tl.load(part + 1), column_step) + column[None, :]
    is_out = is_row[:, None] & is_column[None, :]
    before = tl.load(to, is_out, 0.0)
    tl.store(to, (before.to(tl.float32) + sums).to(before.dtype), is_out)
