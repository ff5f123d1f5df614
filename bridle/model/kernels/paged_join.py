"""The Triton kernel that joins a token's partial attention results, one per chunk of its context. Importing this module
needs Triton. Several partial results are read at once as a tile. The join of a long context with hundreds of chunks
therefore waits for memory only a few times. The tiles, and the order of sums in them, depend only on the token's own
position.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bridle.model.kernels.paged_reads import SEQUENCE

# Parts of the smallest tile. In larger tiles, most loads of a short context would be masked.
FEW = tl.constexpr(8)
MANY = tl.constexpr(32)


@triton.jit
def _join_tiles(
    sums: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    part: tl.tensor,  # of split 0
    length: tl.tensor,  # parts of a split
    first: tl.tensor,  # splits to join
    last: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    value_dim: tl.constexpr,
    block_value: tl.constexpr,
    block_parts: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Join the chunks `first` to `last` (exclusive) of a context. Return the weighted sum of values [Dv] over the
    chunks, and the total weight. `peak` and `total` are the initial maximum score and weight, such as those of a
    sink."""
    number = tl.arange(0, block_value)
    joined = tl.zeros((block_value,), tl.float32)
    for begin in range(first, last, block_parts):
        split = begin + tl.arange(0, block_parts)
        is_part = split < last
        at = (part + split * length).to(tl.int64) * tl.num_programs(2) + tl.program_id(2)
        others = tl.load(peaks + at, is_part, float("-inf"))
        weights = tl.load(totals + at, is_part, 0.0)
        is_number = is_part[:, None] & (number < value_dim)[None, :]
        tile = tl.load(sums + at[:, None] * value_dim + number[None, :], is_number, 0.0)
        highest = tl.maximum(peak, tl.max(others, 0))
        mine, theirs = tl.exp(peak - highest), tl.exp(others - highest)
        joined = joined * mine + tl.sum(tile * theirs[:, None], 0)
        total = total * mine + tl.sum(weights * theirs, 0)
        peak = highest
    return joined, total


@triton.jit(do_not_specialize=["first_sequence", "first_part"])
def join_parts(
    sums: tl.tensor,  # [parts, Hq, Dv] float32
    peaks: tl.tensor,  # [parts, Hq]
    totals: tl.tensor,  # [parts, Hq]
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
    """Join the partial results of a token in the order of positions. Program axes: sequences, tokens, query heads."""
    sequence = sequences + (first_sequence + tl.program_id(0)) * SEQUENCE
    place, head = tl.program_id(1), tl.program_id(2)
    length = tl.load(sequence + 1)
    if place >= length:
        return
    position = tl.load(sequence + 2) - length + place
    part = tl.load(sequence + 3) - first_part + place
    peak = float("-inf")
    total = 0.0
    if has_sinks:
        peak = tl.load(sinks + head).to(tl.float32)
        total = 1.0
    first, last = tl.maximum(position + 1 - window, 0) // chunk, position // chunk + 1
    if last - first <= FEW:
        joined, total = _join_tiles(
            sums, peaks, totals, part, length, first, last, peak, total, value_dim, block_value, FEW
        )
    else:
        joined, total = _join_tiles(
            sums, peaks, totals, part, length, first, last, peak, total, value_dim, block_value, MANY
        )
    number = tl.arange(0, block_value)
    to = out + (tl.load(sequence) + place).to(tl.int64) * out_stride + head * value_dim + number
    tl.store(to, (joined / total).to(out.dtype.element_ty), number < value_dim)
