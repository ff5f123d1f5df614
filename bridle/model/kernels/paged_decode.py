"""The Triton kernels of `bridle.model.kernels.paged` for few new tokens per sequence. A program computes *works*, which
are chunks of a sequence's context. Importing this module needs Triton.

Pointers: `query` [T, Hq, D]; `keys` [slots, Hkv, D] and `values` [slots, Hkv, Dv], contiguous; `sequences` [N, 5],
`works` [W, 2] and `tables` [seats, blocks], int32. The query heads that share a key head are rows of one product,
`group` rows for each token. A program computes `block_rows` of a sequence's rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bridle.model.kernels.paged_reads import SEQUENCE, WORK, read_positions


@triton.jit
def _attend_work(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    sequence: tl.tensor,  # row of `sequences`
    length: tl.tensor,
    head: tl.tensor,  # key head
    split: tl.tensor,  # which chunk
    tables: tl.tensor,
    sums: tl.tensor,  # [parts, Hq, Dv] float32
    peaks: tl.tensor,  # [parts, Hq]
    totals: tl.tensor,  # [parts, Hq]
    first_part: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    table_stride: tl.tensor,
    scaling: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    group: tl.constexpr,
    dim: tl.constexpr,
    value_dim: tl.constexpr,
    page: tl.constexpr,
    chunk: tl.constexpr,
    block_rows: tl.constexpr,
    block_dim: tl.constexpr,
    block_value: tl.constexpr,
    block_keys: tl.constexpr,
    has_softcap: tl.constexpr,
    is_wide: tl.constexpr,
) -> None:
    """Compute attention of this program's block of rows and key head over one chunk of the context."""
    row = tl.program_id(2) * block_rows + tl.arange(0, block_rows)
    context = tl.load(sequence + 2)
    is_row = row < length * group
    place = row // group
    full = head * group + row % group
    low = split * chunk
    part_sums, peak, total = read_positions(
        query,
        keys,
        values,
        tables + tl.load(sequence + 4).to(tl.int64) * table_stride,
        context - length,
        tl.load(sequence) + place,
        place,
        full,
        is_row,
        head,
        low,
        tl.minimum(context, low + chunk),
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
    part = tl.load(sequence + 3) - first_part + split * length + place
    to = part.to(tl.int64) * (tl.num_programs(1) * group) + full
    number = tl.arange(0, block_value)
    tl.store(peaks + to, peak, is_row)
    tl.store(totals + to, total, is_row)
    tl.store(
        sums + to[:, None] * value_dim + number[None, :], part_sums, is_row[:, None] & (number < value_dim)[None, :]
    )


@triton.jit(do_not_specialize=["first_work", "first_part"])
def attend_part(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    sequences: tl.tensor,
    works: tl.tensor,
    tables: tl.tensor,
    sums: tl.tensor,  # [parts, Hq, Dv] float32
    peaks: tl.tensor,  # [parts, Hq]
    totals: tl.tensor,  # [parts, Hq]
    first_work: tl.tensor,
    first_part: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    table_stride: tl.tensor,
    scaling: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    group: tl.constexpr,
    dim: tl.constexpr,
    value_dim: tl.constexpr,
    page: tl.constexpr,
    chunk: tl.constexpr,
    block_rows: tl.constexpr,
    block_dim: tl.constexpr,
    block_value: tl.constexpr,
    block_keys: tl.constexpr,
    has_softcap: tl.constexpr,
    is_wide: tl.constexpr,
) -> None:
    """Compute attention of a sequence's rows over one chunk of its context. Program axes: works, key heads, blocks of
    rows."""
    work = works + (first_work + tl.program_id(0)) * WORK
    sequence = sequences + tl.load(work) * SEQUENCE
    length = tl.load(sequence + 1)
    if tl.program_id(2) * block_rows >= length * group:
        return  # another sequence of the step has more tokens
    _attend_work(
        query,
        keys,
        values,
        sequence,
        length,
        tl.program_id(1),
        tl.load(work + 1),
        tables,
        sums,
        peaks,
        totals,
        first_part,
        token_stride,
        head_stride,
        key_stride,
        value_stride,
        table_stride,
        scaling,
        window,
        softcap,
        group,
        dim,
        value_dim,
        page,
        chunk,
        block_rows,
        block_dim,
        block_value,
        block_keys,
        has_softcap,
        is_wide,
    )


@triton.jit
def attend_works(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    sequences: tl.tensor,
    counts: tl.tensor,  # the number of works
    works: tl.tensor,
    tables: tl.tensor,
    sums: tl.tensor,  # [parts, Hq, Dv] float32
    peaks: tl.tensor,  # [parts, Hq]
    totals: tl.tensor,  # [parts, Hq]
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    table_stride: tl.tensor,
    scaling: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    group: tl.constexpr,
    dim: tl.constexpr,
    value_dim: tl.constexpr,
    page: tl.constexpr,
    chunk: tl.constexpr,
    block_rows: tl.constexpr,
    block_dim: tl.constexpr,
    block_value: tl.constexpr,
    block_keys: tl.constexpr,
    has_softcap: tl.constexpr,
    is_wide: tl.constexpr,
) -> None:
    """Compute the works of sequences with one new token. Only the device knows the number of works, so each program
    loops over works. Program axes: works (strided), key heads, blocks of query heads."""
    for number in range(tl.program_id(0), tl.load(counts), tl.num_programs(0)):
        work = works + number * WORK
        sequence = sequences + tl.load(work) * SEQUENCE
        # The length is 1. The compiler does not know this, so it keeps no value that depends on the length in registers
        # between works.
        length = tl.load(sequence + 1)
        _attend_work(
            query,
            keys,
            values,
            sequence,
            length,
            tl.program_id(1) * length,
            tl.load(work + 1),
            tables,
            sums,
            peaks,
            totals,
            0,
            token_stride,
            head_stride,
            key_stride,
            value_stride,
            table_stride,
            scaling,
            window,
            softcap,
            group,
            dim,
            value_dim,
            page,
            chunk,
            block_rows,
            block_dim,
            block_value,
            block_keys,
            has_softcap,
            is_wide,
        )
