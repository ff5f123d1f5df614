"""Attention in CUDA graphs, which read all inputs of a step at fixed addresses of the device. Every token is a separate
row, except tokens of long chunks, which have tiles. Only the device knows the number of works, so a fixed number of
programs shares all works. Programs for unused tiles end at once. Works and tiles are computed as in
`bridle.model.kernels.paged`, and give the same bits.
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

#: Maximum new pages that a step uploads within its graph. More pages, as when a long sequence resumes, are uploaded
#: before the graph runs.
NEWS_ROOM = 512
#: Programs that share the works, as a multiple of the number that keeps the device busy.
_SHARERS = 2


class StepShape(NamedTuple):
    """Capacity of a captured step: number of tokens, of tokens that give logits, and of long chunks."""

    num_tokens: int
    num_logits: int
    num_long: int = 0

    @property
    def num_tiles(self) -> int:
        """Return the maximum number of tiles of `num_long` chunks. The last tile of each chunk may be partly filled."""
        return self.num_long and self.num_tokens // paged.TILE + self.num_long


class RowNumbers(NamedTuple):
    """Input of the kernels, int32. Shapes: counts of works [2], new pages [NEWS_ROOM, 2], rows [T, 5], long chunks [L,
    5], tiles [N, 2], and works [W, 2]."""

    counts: Any
    news: Any
    sequences: Any
    long: Any
    tiles: Any
    works: Any


def parts_of(words: Any, shape: StepShape) -> RowNumbers:
    """Split int32 `words`, a tensor or an array, into the fields of `RowNumbers`."""
    parts, start = [], 0
    for count, width in _sections(shape):
        parts.append(words[start : start + count * width].reshape(count, width))
        start += aligned(count * width, 4)
    counts, news, sequences, long, tiles = parts
    return RowNumbers(counts[0], news, sequences, long, tiles, words[start:].reshape(-1, 2))


def num_words(shape: StepShape, num_works: int) -> int:
    """Return the total number of int32 words in `RowNumbers`."""
    return sum(aligned(count * width, 4) for count, width in _sections(shape)) + 2 * num_works


def _sections(shape: StepShape) -> tuple[tuple[int, int], ...]:
    """Return the shape of each field of `RowNumbers`, except the works."""
    return (1, 2), (NEWS_ROOM, 2), (shape.num_tokens, 5), (shape.num_long, 5), (shape.num_tiles, 2)


class Scratch:
    """Memory for the partial results of `num_parts` works, which the layers use one after the other."""

    def __init__(self, num_parts: int, geometry: Geometry, device: torch.device) -> None:
        self.num_parts = num_parts
        heads = max(shape.num_heads for shape in geometry.layers.values())
        numbers = max(shape.num_heads * shape.value_dim for shape in geometry.layers.values())
        self._sums = torch.empty(num_parts * numbers, dtype=torch.float32, device=device)
        self._peaks = torch.empty(num_parts * heads, dtype=torch.float32, device=device)
        self._totals = torch.empty_like(self._peaks)

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return flat memory for the sums, maxima and total weights of all works, large enough for every layer."""
        return self._sums, self._peaks, self._totals


def room_for_parts(geometry: Geometry) -> int:
    """Return the maximum number of works in a step, such that their partial results take at most `MAX_PART_BYTES`."""
    numbers = max(shape.num_heads * shape.value_dim for shape in geometry.layers.values())
    return max(paged.MAX_PART_BYTES // (4 * numbers), 1)


class RowsKernel:
    """Implements `AttentionKernel` for captured steps of one size, described by `numbers`. `kernel` computes all other
    steps, and holds the block tables for both."""

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
