"""The Triton kernels of `bridle.model.kernels.paged`, which describes how they divide the work. Importing this module
needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from bridle.model.kernels.paged_decode import attend_part, attend_works
from bridle.model.kernels.paged_join import join_parts
from bridle.model.kernels.paged_prefill import attend_whole

__all__ = ["attend_part", "attend_whole", "attend_works", "join_parts", "take_pages"]

# Numbers for a new page: its index in the tables, and the page.
NEW = tl.constexpr(2)


@triton.jit(do_not_specialize=["count"])
def take_pages(news: tl.tensor, tables: tl.tensor, count: tl.tensor, block: tl.constexpr) -> None:
    """Write new pages into the block tables. Program axis: blocks of pages."""
    number = tl.program_id(0) * block + tl.arange(0, block)
    is_new = number < count
    place = tl.load(news + number * NEW, is_new, 0)
    tl.store(tables + place, tl.load(news + number * NEW + 1, is_new, 0), is_new)
