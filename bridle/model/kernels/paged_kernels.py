"""The Triton kernels of `paged`, which says how they divide the work. Importing this needs Triton.

Pointers: `query` [T, Hq, D] and `out` [T, Hq, Dv]; `keys` [slots, Hkv, D] and `values` [slots, Hkv, Dv], contiguous;
`sequences` [N, 5], `works` [W, 2] and `tables` [seats, blocks], int32. The query heads that share a key head are rows
of one product, `group` rows for each token; a program takes `block_rows` of a sequence's rows.

Keys are read in blocks that begin at multiples of `block_keys` positions in every program. A block in which a row sees
nothing changes no bit of it, so a row's result depends neither on the rows beside it nor on where its pages lie.

`is_wide` multiplies in float32 whatever the type is: Triton's interpreter needs that, as it keeps bfloat16 as integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers of a sequence (offset of its first token, tokens, context, first part, seat), of a work (sequence, chunk) and
# of a new page (place in the tables, page).
SEQUENCE = tl.constexpr(5)
WORK = tl.constexpr(2)
NEW = tl.constexpr(2)


@triton.jit(do_not_specialize=["count"])
def take_pages(news: tl.tensor, tables: tl.tensor, count: tl.tensor, block: tl.constexpr) -> None:
    """Write new pages into the block tables. Programs: blocks of them."""
    number = tl.program_id(0) * block + tl.arange(0, block)
    is_new = number < count
    place = tl.load(news + number * NEW, is_new, 0)
    tl.store(tables + place, tl.load(news + number * NEW + 1, is_new, 0), is_new)


@triton.jit
def _read(
    query: tl.tensor,  # [T, Hq, D]
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,  # of this sequence
    start: tl.tensor,  # the position of the sequence's first token
    token: tl.tensor,  # [rows] in the step
    place: tl.tensor,  # [rows] within the sequence
    full: tl.tensor,  # [rows] query heads
    is_row: tl.tensor,
    head: tl.tensor,  # key head
    low: tl.tensor,  # positions to read
    high: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    scaling: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    dim: tl.constexpr,
    value_dim: tl.constexpr,
    page: tl.constexpr,
    block_rows: tl.constexpr,
    block_dim: tl.constexpr,
    block_value: tl.constexpr,
    block_keys: tl.constexpr,
    has_softcap: tl.constexpr,
    is_wide: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Unnormalized sums [rows, Dv], the largest score and the sum of weights [rows] over positions low to high."""
    number = tl.arange(0, block_dim)
    value_number = tl.arange(0, block_value)
    at_query = query + token.to(tl.int64)[:, None] * token_stride + full[:, None] * head_stride + number[None, :]
    q = tl.load(at_query, is_row[:, None] & (number < dim)[None, :], 0.0)
    if is_wide:
        q = q.to(tl.float32)
    own = start + place  # [rows] positions
    first = tl.maximum(tl.min(tl.where(is_row, own, 2147483647), 0) + 1 - window, 0)
    peak = tl.full((block_rows,), float("-inf"), tl.float32)
    total = tl.zeros((block_rows,), tl.float32)
    sums = tl.zeros((block_rows, block_value), tl.float32)
    for begin in range(tl.maximum(low, first) // block_keys * block_keys, high, block_keys):
        position = begin + tl.arange(0, block_keys)
        is_read = (position < high) & (position >= tl.maximum(low, first))
        slot = tl.load(table + position // page, is_read, 0).to(tl.int64) * page + position % page
        at_key = keys + slot[None, :] * key_stride + head * dim + number[:, None]
        k = tl.load(at_key, is_read[None, :] & (number < dim)[:, None], 0.0)
        if is_wide:
            k = k.to(tl.float32)
        scores = tl.dot(q, k, input_precision="ieee") * scaling
        if has_softcap:
            small = tl.exp(-2.0 * tl.abs(scores) / softcap)  # tanh, without large numbers
            scores = tl.where(scores < 0, -softcap, softcap) * ((1.0 - small) / (1.0 + small))
        is_seen = (position[None, :] <= own[:, None]) & (own[:, None] - position[None, :] < window)
        scores = tl.where(is_seen & is_read[None, :], scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen yet
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(peak - base)
        at_value = values + slot[:, None] * value_stride + head * value_dim + value_number[None, :]
        v = tl.load(at_value, is_read[:, None] & (value_number < value_dim)[None, :], 0.0)
        if is_wide:
            v = v.to(tl.float32)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = highest
    return sums, peak, total


@triton.jit
def _attend_work(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    sequence: tl.tensor,  # its numbers
    length: tl.tensor,
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
    """The rows of this program's block and key head over one chunk of their positions."""
    row = tl.program_id(2) * block_rows + tl.arange(0, block_rows)
    context = tl.load(sequence + 2)
    head = tl.program_id(1)
    is_row = row < length * group
    place = row // group
    full = head * group + row % group
    low = split * chunk
    part_sums, peak, total = _read(
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
    """A sequence's rows over one chunk of its positions. Programs: works, key heads, blocks of rows."""
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
    """Works of sequences of one token, however many the device finds. Programs: each takes every so manieth work; key
    heads, blocks of query heads."""
    for number in range(tl.program_id(0), tl.load(counts), tl.num_programs(0)):
        work = works + number * WORK
        _attend_work(
            query,
            keys,
            values,
            sequences + tl.load(work) * SEQUENCE,
            1,
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


@triton.jit(do_not_specialize=["first_sequence", "first_part"])
def join_parts(
    sums: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    sequences: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    first_sequence: tl.tensor,
    first_part: tl.tensor,
    out_stride: tl.tensor,
    window: tl.tensor,
    value_dim: tl.constexpr,
    chunk: tl.constexpr,
    block_value: tl.constexpr,
    has_sinks: tl.constexpr,
) -> None:
    """A token's parts put together, in the order of positions. Programs: sequences, tokens, query heads."""
    sequence = sequences + (first_sequence + tl.program_id(0)) * SEQUENCE
    place, head = tl.program_id(1), tl.program_id(2)
    length = tl.load(sequence + 1)
    if place >= length:
        return
    position = tl.load(sequence + 2) - length + place
    part = tl.load(sequence + 3) - first_part + place
    number = tl.arange(0, block_value)
    is_number = number < value_dim
    peak = float("-inf")
    total = 0.0
    if has_sinks:
        peak = tl.load(sinks + head).to(tl.float32)
        total = 1.0
    joined = tl.zeros((block_value,), tl.float32)
    for split in range(tl.maximum(position + 1 - window, 0) // chunk, position // chunk + 1):
        at = (part + split * length).to(tl.int64) * tl.num_programs(2) + head
        other = tl.load(peaks + at)
        highest = tl.maximum(peak, other)
        mine, theirs = tl.exp(peak - highest), tl.exp(other - highest)
        joined = joined * mine + tl.load(sums + at * value_dim + number, is_number, 0.0) * theirs
        total = total * mine + tl.load(totals + at) * theirs
        peak = highest
    to = out + (tl.load(sequence) + place).to(tl.int64) * out_stride + head * value_dim + number
    tl.store(to, (joined / total).to(out.dtype.element_ty), is_number)


@triton.jit(do_not_specialize=["first_sequence"])
def attend_whole(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    sequences: tl.tensor,
    tables: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    first_sequence: tl.tensor,
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
    block_rows: tl.constexpr,
    block_dim: tl.constexpr,
    block_value: tl.constexpr,
    block_keys: tl.constexpr,
    has_softcap: tl.constexpr,
    has_sinks: tl.constexpr,
    is_wide: tl.constexpr,
) -> None:
    """Rows of a long chunk over all that they see. Programs: blocks of rows, key heads, sequences."""
    number = first_sequence + tl.program_id(2)
    sequence = sequences + number * SEQUENCE
    length = tl.load(sequence + 1)
    first_row = tl.program_id(0) * block_rows
    if first_row >= length * group:
        return  # another sequence of the step has more tokens
    row = first_row + tl.arange(0, block_rows)
    context = tl.load(sequence + 2)
    head = tl.program_id(1)
    is_row = row < length * group
    place = row // group
    full = head * group + row % group
    token = tl.load(sequence) + place
    start = context - length
    last = tl.minimum((first_row + block_rows - 1) // group, length - 1)
    sums, peak, total = _read(
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
