"""The Triton kernels of `CodeLinear`, which describes how they divide the work. Importing this module needs Triton.

The pointers (see `codes.py`) are `rows` [T, in], `words` int32 [slots * bits / 32, out], `scales` and `zeros` [groups,
out], `order` int32 [slots]. Outputs are `sums` float32 [shares, T, out] and `out` [T, out].

Slots are cut into *shares*, whose sizes depend only on the shape of the weight. Products are added in the order of
slots within a share, and then in the order of shares. The order is the same whether shares are computed in parallel or
one after the other. Rows are multiplied in tiles of 16 or 32 rows, which use the same matrix instruction. So a row
gives the same bits in any batch.

Products of integers minus their zero points are exact. The sum over the slots of a run is multiplied by the run's
scale.

With `is_wide`, products are in float32 for any type. Triton's interpreter needs `is_wide`, because it stores bfloat16
values as integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

RUN = tl.constexpr(16)


@triton.jit
def _values(
    packed: tl.tensor,  # [run, columns] words
    zeros: tl.tensor,
    at: tl.tensor,  # [columns] index of a group's scale and zero point
    is_column: tl.tensor,
    part: tl.constexpr,
    zero: tl.constexpr,
    bits: tl.constexpr,
    is_float: tl.constexpr,
    has_zeros: tl.constexpr,
) -> tl.tensor:
    """Return the code at index `part` of each word as a float, minus its zero point. float8 codes are returned divided
    by 256."""
    code = (packed >> (part * bits)) & ((1 << bits) - 1)
    if is_float:
        half = ((code & 128) << 8) | ((code & 127) << 7)
        number = half.to(tl.uint16).to(tl.float16, bitcast=True)
    elif has_zeros:
        number = (code - tl.load(zeros + at, is_column, 0).to(tl.int32)[None, :]).to(tl.float32)
    else:
        number = (code - zero).to(tl.float32)
    return number


@triton.jit
def _multiply(
    rows: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    order: tl.tensor,
    row: tl.tensor,  # [rows]
    column: tl.tensor,  # [columns]
    first: tl.tensor,  # blocks of slots
    last: tl.tensor,
    num_rows: tl.tensor,
    num_inputs: tl.tensor,
    num_columns: tl.tensor,
    num_groups: tl.tensor,
    group_runs: tl.tensor,
    row_stride: tl.tensor,
    zero: tl.constexpr,
    bits: tl.constexpr,
    is_float: tl.constexpr,
    has_zeros: tl.constexpr,
    has_order: tl.constexpr,
    is_wide: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> tl.tensor:
    """Return the sums of products [rows, columns] over blocks of slots `first` to `last` (exclusive)."""
    is_row, is_column = row < num_rows, column < num_columns
    number = tl.arange(0, RUN)
    at_row = rows + row.to(tl.int64)[:, None] * row_stride
    total = tl.zeros((block_rows, block_columns), tl.float32)
    for block in range(first, last):
        at_word = words + (number + block * RUN).to(tl.int64)[:, None] * num_columns + column[None, :]
        packed = tl.load(at_word, is_column[None, :], 0)
        for part in tl.static_range(32 // bits):
            run = block * (32 // bits) + part
            slot = number + run * RUN
            if has_order:
                place = tl.load(order + slot)
                is_input = place >= 0
            else:
                place = slot
                is_input = slot < num_inputs
            x = tl.load(at_row + place[None, :], is_row[:, None] & is_input[None, :], 0.0)
            at = tl.minimum(run // group_runs, num_groups - 1) * num_columns + column
            scale = tl.load(scales + at, is_column, 0.0).to(tl.float32)
            value = _values(packed, zeros, at, is_column, part, zero, bits, is_float, has_zeros)
            if is_float:
                scale = scale * 256.0
            if is_wide:
                x, value = x.to(tl.float32), value.to(tl.float32)
            else:
                value = value.to(x.dtype)
            total += tl.dot(x, value, input_precision="ieee") * scale[None, :]
    return total


@triton.jit(do_not_specialize=["num_rows"])
def multiply_part(
    rows: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    order: tl.tensor,
    sums: tl.tensor,
    num_rows: tl.tensor,
    num_inputs: tl.tensor,
    num_columns: tl.tensor,
    num_groups: tl.tensor,
    group_runs: tl.tensor,
    row_stride: tl.tensor,
    num_blocks: tl.tensor,
    share_blocks: tl.tensor,
    zero: tl.constexpr,
    bits: tl.constexpr,
    is_float: tl.constexpr,
    has_zeros: tl.constexpr,
    has_order: tl.constexpr,
    is_wide: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    """Compute one share of the slots. Program axes: blocks of rows, blocks of columns, shares."""
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    first = tl.program_id(2) * share_blocks
    total = _multiply(
        rows,
        words,
        scales,
        zeros,
        order,
        row,
        column,
        first,
        tl.minimum(first + share_blocks, num_blocks),
        num_rows,
        num_inputs,
        num_columns,
        num_groups,
        group_runs,
        row_stride,
        zero,
        bits,
        is_float,
        has_zeros,
        has_order,
        is_wide,
        block_rows,
        block_columns,
    )
    to = (tl.program_id(2) * num_rows + row).to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(sums + to, total, (row < num_rows)[:, None] & (column < num_columns)[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_shares"])
def join_shares(
    sums: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    num_shares: tl.tensor,
    has_bias: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    """Add the sums of all shares in order. Program axes: rows, blocks of columns."""
    row = tl.program_id(0)
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    is_column = column < num_columns
    total = tl.zeros((block_columns,), tl.float32)
    for share in range(num_shares):
        at = (row + share * num_rows).to(tl.int64) * num_columns + column
        total += tl.load(sums + at, is_column, 0.0)
    if has_bias:
        total += tl.load(bias + column, is_column, 0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * num_columns + column, total.to(out.dtype.element_ty), is_column)


@triton.jit(do_not_specialize=["num_rows", "num_shares"])
def multiply_whole(
    rows: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    order: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_inputs: tl.tensor,
    num_columns: tl.tensor,
    num_groups: tl.tensor,
    group_runs: tl.tensor,
    row_stride: tl.tensor,
    num_blocks: tl.tensor,
    share_blocks: tl.tensor,
    num_shares: tl.tensor,
    zero: tl.constexpr,
    bits: tl.constexpr,
    is_float: tl.constexpr,
    has_zeros: tl.constexpr,
    has_order: tl.constexpr,
    has_bias: tl.constexpr,
    is_wide: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    """Compute all shares, one after the other. Program axes: blocks of rows, blocks of columns."""
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    is_column = column < num_columns
    total = tl.zeros((block_rows, block_columns), tl.float32)
    for share in range(num_shares):
        total += _multiply(
            rows,
            words,
            scales,
            zeros,
            order,
            row,
            column,
            share * share_blocks,
            tl.minimum((share + 1) * share_blocks, num_blocks),
            num_rows,
            num_inputs,
            num_columns,
            num_groups,
            group_runs,
            row_stride,
            zero,
            bits,
            is_float,
            has_zeros,
            has_order,
            is_wide,
            block_rows,
            block_columns,
        )
    if has_bias:
        total += tl.load(bias + column, is_column, 0.0).to(tl.float32)[None, :]
    to = row.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), (row < num_rows)[:, None] & is_column[None, :])


@triton.jit
def decode(
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    order: tl.tensor,
    out: tl.tensor,  # [inputs, columns]
    num_inputs: tl.tensor,
    num_columns: tl.tensor,
    num_groups: tl.tensor,
    group_runs: tl.tensor,
    zero: tl.constexpr,
    bits: tl.constexpr,
    is_float: tl.constexpr,
    has_zeros: tl.constexpr,
    has_order: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    """Decode the weight to floating point, transposed: [in, out]. Program axes: blocks of slots, blocks of columns."""
    block = tl.program_id(0)
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    is_column = column < num_columns
    number = tl.arange(0, RUN)
    at_word = words + (number + block * RUN).to(tl.int64)[:, None] * num_columns + column[None, :]
    packed = tl.load(at_word, is_column[None, :], 0)
    for part in tl.static_range(32 // bits):
        run = block * (32 // bits) + part
        slot = number + run * RUN
        place, is_input = slot, slot < num_inputs
        if has_order:
            place = tl.load(order + slot)
            is_input = place >= 0
        at = tl.minimum(run // group_runs, num_groups - 1) * num_columns + column
        scale = tl.load(scales + at, is_column, 0.0).to(tl.float32)
        value = _values(packed, zeros, at, is_column, part, zero, bits, is_float, has_zeros).to(tl.float32)
        if is_float:
            scale = scale * 256.0
        to = out + place.to(tl.int64)[:, None] * num_columns + column[None, :]
        tl.store(to, (value * scale[None, :]).to(out.dtype.element_ty), is_input[:, None] & is_column[None, :])
