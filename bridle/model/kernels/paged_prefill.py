"""The Triton kernel of `bridle.model.kernels.paged` for long chunks. A program computes a block of a tile's rows over
all positions that they attend to. Pointers are the same as in `paged_decode`; in addition, `tiles` is int32 [tiles, 2].
Importing this module needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bridle.model.kernels.paged_reads import SEQUENCE, WORK, read_positions


@triton.jit
def attend_whole(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    sequences: tl.tensor,
    tiles: tl.tensor,
    tables: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    table_stride: tl.tensor,
    out_stride: tl.tensor,
    scaling: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    group: tl.constexpr,
    dim: tl.constexpr,
    value_dim: tl.constexpr,
    page: tl.constexpr,
    tile: tl.constexpr,
    block_rows: tl.constexpr,
    block_dim: tl.constexpr,
    block_value: tl.constexpr,
    block_keys: tl.constexpr,
    has_softcap: tl.constexpr,
    has_sinks: tl.constexpr,
    is_wide: tl.constexpr,
) -> None:
    """Compute attention for rows of a tile of `tile` tokens over all positions that they attend to. Program axes:
    blocks of rows, key heads, tiles."""
    work = tiles + tl.program_id(2) * WORK
    sequence = sequences + tl.load(work) * SEQUENCE
    length = tl.load(sequence + 1)
    first_row = tl.load(work + 1) * (tile * group) + tl.program_id(0) * block_rows
    if first_row >= length * group:
        return  # the chunk's last tile is not full, or this one is unused
    row = first_row + tl.arange(0, block_rows)
    context = tl.load(sequence + 2)
    head = tl.program_id(1)
    is_row = row < length * group
    place = row // group
    full = head * group + row % group
    token = tl.load(sequence) + place
    start = context - length
    last = tl.minimum((first_row + block_rows - 1) // group, length - 1)
    sums, peak, total = read_positions(
        query,
        keys,
        values,
        tables + tl.load(sequence + 4).to(tl.int64) * table_stride,
        start,
        token,
        place,
        full,
        is_row,
        head,
        0,
        start + last + 1,
        token_stride,
        head_stride,
        key_stride,
        value_stride,
        scaling,
        window,
        softcap,
        dim,
        value_dim,
        page,
        block_rows,
        block_dim,
        block_value,
        block_keys,
        has_softcap,
        is_wide,
    )
    if has_sinks:
        sink = tl.load(sinks + full, is_row, 0.0).to(tl.float32)
        highest = tl.maximum(peak, sink)
        mine = tl.exp(peak - highest)
        total = total * mine + tl.exp(sink - highest)
        sums = sums * mine[:, None]
    total = tl.where(is_row, total, 1.0)
    number = tl.arange(0, block_value)
    to = out + token.to(tl.int64)[:, None] * out_stride + full[:, None] * value_dim + number[None, :]
    tl.store(to, (sums / total[:, None]).to(out.dtype.element_ty), is_row[:, None] & (number < value_dim)[None, :])
