"""Attention over steps that numbers at fixed places of a device describe, for use in graphs.

Every token is a row of its own, except those of long chunks, which have tiles. How many works there are is known to the
device alone, so a fixed number of programs shares them; tiles that a step has no use for end at once. Works and tiles
are done as `paged` does them, and give the same bits.
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


class StepShape(NamedTuple):
    """The most that a step may hold: tokens, those that give logits, and long chunks."""

    num_tokens: int
    num_logits: int
    num_long: int = 0

    @property
    def num_tiles(self) -> int:
        """The tiles of as many chunks: the last one of each need not be full."""
        return self.num_long and self.num_tokens // paged.TILE + self.num_long


class RowNumbers(NamedTuple):
    """Input of the kernels, int32: the number of works [2], new pages [NEWS_ROOM, 2], rows [T, 5], long chunks [L, 5],
    their tiles [N, 2], and works [W, 2]."""

    counts: Any
    news: Any
    sequences: Any
    long: Any
    tiles: Any
    works: Any


def parts_of(words: Any, shape: StepShape) -> RowNumbers:
    """The parts of int32 `words`, which are a tensor or an array; works come last."""
    parts, start = [], 0
    for count, width in _sections(shape):
        parts.append(words[start : start + count * width].reshape(count, width))
        start += aligned(count * width, 4)
    counts, news, sequences, long, tiles = parts
    return RowNumbers(counts[0], news, sequences, long, tiles, words[start:].reshape(-1, 2))


def num_words(shape: StepShape, num_works: int) -> int:
    """Return the number of int32 words of all parts."""
    return sum(aligned(count * width, 4) for count, width in _sections(shape)) + 2 * num_works


def _sections(shape: StepShape) -> tuple[tuple[int, int], ...]:
    """Entries, and numbers of each, of all parts before the works."""
    return (1, 2), (NEWS_ROOM, 2), (shape.num_tokens, 5), (shape.num_long, 5), (shape.num_tiles, 2)


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
        call = AttentionCall(query, cache, options, out, self._paged.machine)
        with self._paged.machine.chosen():
            self._attend_works(call)
            self._join(call)
            if len(self._numbers.tiles):
                self._paged.attend_tiles(call, self._numbers.long, self._numbers.tiles, len(self._numbers.tiles))
        return out  # [T, Hq, Dv]

    def _attend_works(self, call: AttentionCall) -> None:
        counts, sequences, works = self._numbers.counts, self._numbers.sequences, self._numbers.works
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
