"""Attention over steps whose every token is a row of its own, told by numbers at fixed places of a device: what a graph
replays.

How many works there are is known to the device alone, so a fixed number of programs shares them. Each work is done as
`paged` does those of short chunks, and gives the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bridle.model.batch_inputs import PackedStep
from bridle.model.forward_context import AttentionOptions
from bridle.model.geometry import Geometry
from bridle.model.h2d_copies import aligned
from bridle.model.kernels import paged
from bridle.model.kernels.paged import PagedKernel
from bridle.model.kernels.paged_call import AttentionCall, block_of
from bridle.model.kv_cache import LayerCache

#: New pages that a step tells within its graph. More than that, as when a long sequence comes back, are told before it.
NEWS_ROOM = 512
#: Programs that share the works, in times of what keeps the device busy.
_SHARERS = 2


class RowNumbers(NamedTuple):
    """Input of the kernels, int32: the number of works [2], new pages [NEWS_ROOM, 2], rows [T, 5] and works [W, 2]."""

    counts: Any
    news: Any
    sequences: Any
    works: Any


def parts_of(words: Any, num_tokens: int) -> RowNumbers:
    """The parts of int32 `words`, which are a tensor or an array; works come last."""
    news = aligned(2, 4)
    sequences = news + 2 * NEWS_ROOM
    works = sequences + aligned(5 * num_tokens, 4)
    return RowNumbers(
        words[:2],
        words[news:sequences].reshape(-1, 2),
        words[sequences : sequences + 5 * num_tokens].reshape(-1, 5),
        words[works:].reshape(-1, 2),
    )


def num_words(num_tokens: int, num_works: int) -> int:
    """Return the number of int32 words of all parts."""
    return aligned(2, 4) + 2 * NEWS_ROOM + aligned(5 * num_tokens, 4) + 2 * num_works


class Scratch:
    """Memory for the parts of `num_parts` works of any layer, used by one after the other."""

    def __init__(self, num_parts: int, geometry: Geometry, device: torch.device) -> None:
        self.num_parts = num_parts
        heads = max(shape.num_heads for shape in geometry.layers.values())
        numbers = max(shape.num_heads * shape.value_dim for shape in geometry.layers.values())
        self._sums = torch.empty(num_parts * numbers, dtype=torch.float32, device=device)
        self._peaks = torch.empty(num_parts * heads, dtype=torch.float32, device=device)
        self._totals = torch.empty_like(self._peaks)

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sums, peaks and totals, as the kernels take them: contiguous, whatever the layer's shape is."""
        return self._sums, self._peaks, self._totals


def room_for_parts(geometry: Geometry) -> int:
    """The most works that a step may have, for their parts to keep within their bounds."""
    numbers = max(shape.num_heads * shape.value_dim for shape in geometry.layers.values())
    return max(paged.MAX_PART_BYTES // (4 * numbers), 1)


class RowsKernel:
    """Implements `AttentionKernel` for steps of one size, whose numbers are `numbers`. The block tables are those of
    `kernel`, which computes all other steps."""

    name = "rows"

    def __init__(self, kernel: PagedKernel, numbers: RowNumbers, scratch: Scratch) -> None:
        self._paged, self._numbers, self._scratch = kernel, numbers, scratch

    def begin(self, step: PackedStep) -> None:
        self._paged.take(self._numbers.news, NEWS_ROOM)

    def attend(self, query: Tensor, cache: LayerCache, options: AttentionOptions) -> Tensor:
        query = query if query.stride(-1) == 1 else query.contiguous()
        out = query.new_empty(*query.shape[:2], cache.values.shape[-1])
        call = AttentionCall(query, cache, options, out, self._paged.machine.is_wide)
        with self._paged.machine.chosen():
            self._attend_works(call)
            self._join(call)
        return out  # [T, Hq, Dv]

    def _attend_works(self, call: AttentionCall) -> None:
        counts, _, sequences, works = self._numbers
        sizes = call.sizes(is_short=True)
        blocks = -(-call.group // sizes["block_rows"])
        wanted = _SHARERS * self._paged.machine.enough // (call.kv_heads * blocks)
        grid = (max(min(wanted, self._scratch.num_parts), 1), call.kv_heads, blocks)
        self._paged.kernels.attend_works[grid](
            *call.inputs(sequences, counts, works, self._paged.tables, *self._scratch.parts()),
            *call.strides,
            self._paged.seats.width,
            *call.numbers,
            chunk=paged.CHUNK,
            **sizes,
        )

    def _join(self, call: AttentionCall) -> None:
        sequences = self._numbers.sequences
        self._paged.kernels.join_parts[(sequences.shape[0], 1, call.num_heads)](
            *self._scratch.parts(),
            sequences,
            call.sinks,
            call.out,
            0,
            0,
            call.out.stride(0),
            call.window,
            value_dim=call.value_dim,
            chunk=paged.CHUNK,
            block_value=block_of(call.value_dim),
            has_sinks=call.has_sinks,
            num_warps=paged.JOIN_WARPS,
        )
