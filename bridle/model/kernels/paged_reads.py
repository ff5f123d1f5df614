"""The loop that the attention kernels of `bridle.model.kernels.paged` share. The loop computes a block of rows over the
positions that these rows attend to. Importing this module needs Triton.

Every program reads keys in blocks that begin at multiples of `block_keys` positions. If no position of a block is
visible to a row, the block changes no bit of the row's result. A row's result therefore does not depend on other rows,
or on the order of its pages.

The loop loads the entries of the block table one iteration ahead. Otherwise, a key's address would depend on a load of
the same iteration, which takes one of Triton's pipeline stages. With table entries loaded ahead, keys and values get
`num_stages` - 1 buffers. The loads of an iteration then overlap the products of the previous iteration.

With `is_wide`, products are in float32 for any type. Triton's interpreter needs `is_wide`, because it stores bfloat16
values as integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers of a sequence (offset of its first token, tokens, context, first part, seat) and of a work (sequence, chunk).
SEQUENCE = tl.constexpr(5)
WORK = tl.constexpr(2)


@triton.jit
def read_positions(
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
    """Return unnormalized sums [rows, Dv], the largest score and the sum of weights [rows] over positions `low` to
    `high`."""
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
    low = tl.maximum(low, first)
    begin_at = low // block_keys * block_keys
    ahead = begin_at + tl.arange(0, block_keys)
    block = tl.load(table + ahead // page, (ahead < high) & (ahead >= low), 0)
    for begin in range(begin_at, high, block_keys):
        position = begin + tl.arange(0, block_keys)
        is_read = (position < high) & (position >= low)
        slot = block.to(tl.int64) * page + position % page
        block = tl.load(table + (position + block_keys) // page, position + block_keys < high, 0)
        at_key = (keys + head * dim + number)[:, None] + (slot * key_stride)[None, :]
        k = tl.load(at_key, is_read[None, :] & (number < dim)[:, None], 0.0)
        if is_wide:
            k = k.to(tl.float32)
        scores = tl.dot(q, k, input_precision="ieee") * scaling
        if has_softcap:
            small = tl.exp(-2.0 * tl.abs(scores) / softcap)  # tanh that avoids large numbers
            scores = tl.where(scores < 0, -softcap, softcap) * ((1.0 - small) / (1.0 + small))
        is_seen = (position[None, :] <= own[:, None]) & (own[:, None] - position[None, :] < window)
        scores = tl.where(is_seen & is_read[None, :], scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)  # no visible position so far
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(peak - base)
        at_value = (values + head * value_dim + value_number)[None, :] + (slot * value_stride)[:, None]
        v = tl.load(at_value, is_read[:, None] & (value_number < value_dim)[None, :], 0.0)
        if is_wide:
            v = v.to(tl.float32)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = highest
    return sums, peak, total
