"""The Triton kernel that copies blocks of a KV cache; `bridle.model.block_copies` describes its use. Importing this
module needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_blocks(
    pairs: tl.tensor,  # [N, 2] int64: source and target blocks
    pools: tl.tensor,  # [P, 2] int64: the address of each pool, and the 8-byte words of one of its blocks
    block: tl.constexpr,
) -> None:
    """Copy blocks. Program axes: pairs of blocks, pools, parts of a block."""
    pair = pairs + tl.program_id(0) * 2
    pool = pools + tl.program_id(1) * 2
    size = tl.load(pool + 1)
    number = tl.program_id(2).to(tl.int64) * block + tl.arange(0, block)
    words = tl.multiple_of(tl.load(pool).to(tl.pointer_type(tl.int64)), 16)
    found = tl.load(words + tl.load(pair) * size + number, number < size, 0)
    tl.store(words + tl.load(pair + 1) * size + number, found, number < size)
