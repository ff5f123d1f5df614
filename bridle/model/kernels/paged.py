"""Attention on CUDA by bridle's Triton kernels over the block table, for KV blocks (pages) of any size. If a sequence
has few new tokens, such as one decode token, its context is cut into *works* of `CHUNK` positions. A GPU is therefore
busy even with a few sequences, if their contexts are long. A second kernel joins the partial results. A longer chunk is
cut into *tiles* of `TILE` tokens; a program computes a tile over all positions that it attends to. Works and tiles
depend only on the sequence itself, and works start at multiples of `CHUNK`. A sequence's result therefore has the same
bits whatever other sequences are in the step.

The kernels support heads of any width up to `MAX_DIM`, grouped heads, values narrower than keys, sliding windows,
soft-capping and sinks. Wider heads are computed in plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bridle.lora.fused import Machine
from bridle.model.batch_inputs import PackedRow, PackedStep
from bridle.model.forward_context import AttentionOptions
from bridle.model.h2d_copies import aligned, in_sections, upload
from bridle.model.kernels.block_table_slots import BlockTableSlots
from bridle.model.kernels.cpu import CpuKernel
from bridle.model.kernels.paged_call import AttentionCall
from bridle.model.kernels.prompts import MIN_TOKENS, PromptKernel
from bridle.model.kv_cache import LayerCache

#: Number of positions of a work.
CHUNK = 256
#: Maximum tokens of a sequence in a step for which its context is cut into works.
MAX_SHORT = 32
#: Tokens of a tile. The rows of a tile fill whole blocks, for any number of query heads per key head.
TILE = 64
#: The widest head that fits into registers with the other data of a program.
MAX_DIM = 256
#: Maximum bytes of parts at once. A step with more parts is computed in several passes.
MAX_PART_BYTES = 128 << 20
#: Warps of a program that joins parts. The program reads the parts as a tile.
JOIN_WARPS = 4
#: Maximum new pages that one program writes.
NEWS = 256

Ints = npt.NDArray[np.int32]


class SequencePart(NamedTuple):
    """Sequences `first` to `last` (exclusive) of a step, with the offsets of their works and of the works' partial
    results."""

    first: int
    last: int
    first_work: int
    num_works: int
    first_part: int
    num_parts: int
    longest: int


class PromptRow(NamedTuple):
    """A sequence whose chunk is long enough for an external attention kernel. `num_tiles` is the chunk's number of
    tiles."""

    offset: int
    length: int
    context: int
    seat: int
    num_tiles: int


@dataclass(slots=True)
class PagedLayout:
    """A step's sequences as the kernels read them. Sequences with few new tokens come first, those with long chunks
    (`prompts`) last.

    `words` holds, in this order:

    * `num_sequences` rows of [offset, tokens, context, first partial result, row of the block table];
    * works of short sequences, as [sequence, chunk];
    * tiles of long chunks, as [sequence, tile];
    * `num_news` pages that the block table on the device lacks, as [index in the table, page].
    """

    words: Ints
    num_sequences: int
    num_works: int
    num_tiles: int
    num_news: int
    short: list[SequencePart]  # one entry per sequence
    prompts: list[PromptRow]  # the last of the sequences that are not short


def lay_out(rows: Sequence[PackedRow], block_size: int, seats: BlockTableSlots) -> PagedLayout:
    """Return the layout of a step's rows for the kernels."""
    short = [row for row in rows if row.length <= MAX_SHORT]
    long = sorted((row for row in rows if row.length > MAX_SHORT), key=lambda row: row.length >= MIN_TOKENS)
    ordered = short + long
    numbers, news = seats.place(ordered, block_size)
    sequences = np.empty((len(ordered), 5), np.int32)
    entries, num_parts, num_works = [], 0, 0
    for number, row in enumerate(ordered):
        sequences[number] = (row.offset, row.length, row.context, num_parts, numbers[number])
        if number < len(short):
            chunks = -(-row.context // CHUNK)
            entries.append(
                SequencePart(number, number + 1, num_works, chunks, num_parts, chunks * row.length, row.length),
            )
            num_works += chunks
            num_parts += chunks * row.length
    works = np.empty((num_works, 2), np.int32)
    counts = [entry.num_works for entry in entries]
    works[:, 0] = np.repeat(np.arange(len(entries)), counts)
    works[:, 1] = np.arange(num_works) - np.repeat([entry.first_work for entry in entries], counts)
    tiles = tiles_of([row.length for row in long], len(short))
    words = in_sections([sequences, works, tiles, news])
    prompts = [
        PromptRow(row.offset, row.length, row.context, int(seat), -(-row.length // TILE))
        for row, seat in zip(ordered, numbers, strict=False)
        if row.length >= max(MIN_TOKENS, MAX_SHORT + 1)
    ]
    return PagedLayout(words, len(ordered), num_works, len(tiles), len(news), entries, prompts)


def tiles_of(lengths: Sequence[int], first: int) -> Ints:
    """Return the tiles, int32 [N, 2] of (sequence, tile), of chunks with these lengths. The sequences of these chunks
    are numbered from `first` on."""
    counts = [-(-length // TILE) for length in lengths]
    pairs = [(first + number, tile) for number, count in enumerate(counts) for tile in range(count)]
    return np.array(pairs, np.int32).reshape(-1, 2)


class LayoutParts(NamedTuple):
    """The layout of a step, and the parts of the layout as tensors on the device."""

    layout: PagedLayout
    sequences: Tensor
    works: Tensor
    tiles: Tensor
    news: Tensor


def turns(entries: Sequence[SequencePart], max_parts: int) -> Iterator[SequencePart]:
    """Group sequences, in order, so that a group has at most `max_parts` partial results. A sequence with more than
    `max_parts` partial results is a group alone."""
    current: SequencePart | None = None
    for entry in entries:
        if current is not None and current.num_parts + entry.num_parts <= max_parts:
            current = SequencePart(
                current.first,
                entry.last,
                current.first_work,
                current.num_works + entry.num_works,
                current.first_part,
                current.num_parts + entry.num_parts,
                max(current.longest, entry.longest),
            )
            continue
        if current is not None:
            yield current
        current = entry
    if current is not None:
        yield current


class PagedKernel:
    """Implements `AttentionKernel` over the block table, for chunks of any length."""

    name = "paged"

    def __init__(self, device: torch.device) -> None:
        self.machine = Machine(device)
        self._fallback = CpuKernel()
        self._step: PackedStep | None = None
        self._layout: PagedLayout | None = None
        self.packed_words: Tensor | None = None  # of the layout, on the device
        self.seats = BlockTableSlots()
        self.tables: Tensor | None = None  # [rows, width] int32: the blocks of sequences, kept between steps
        self.prompts: PromptKernel | None = None  # computes the longest chunks, in layers that it supports

    @cached_property
    def kernels(self) -> Any:
        """Return the module of Triton kernels. The import takes a moment, and needs Triton."""
        from bridle.model.kernels import paged_kernels

        return paged_kernels

    def words(self, rows: Sequence[PackedRow], block_size: int) -> Ints:
        """Return the layout of a step as int32 words, which are uploaded with the step's inputs. The layout is stored
        for the next call of `begin`."""
        self._layout = lay_out(rows, block_size, self.seats)
        return self._layout.words

    def begin(self, step: PackedStep) -> None:
        self._fallback.begin(step)
        if step.words is None:
            words = self.words(step.rows, step.block_size)
            self.packed_words = upload(words, step.slots.device)
        else:
            self.packed_words = step.words
        self._step = step
        self.make_tables(step.slots.device)
        parts = self._parts()
        if parts.layout.num_news:
            self.take(parts.news, parts.layout.num_news)

    def make_tables(self, device: torch.device) -> Tensor:
        """Return the block tables on the device; reallocate them if the size in `seats` changed."""
        shape = (self.seats.num_seats, self.seats.width)
        if self.tables is None or self.tables.shape != shape:
            self.tables = None  # free the old table before the allocation
            self.tables = torch.empty(shape, dtype=torch.int32, device=device)
        return self.tables

    def take(self, news: Tensor, count: int) -> None:
        """Write new pages, [count, 2] int32, into the block tables."""
        with self.machine.chosen():
            self.kernels.take_pages[(-(-count // NEWS),)](news, self.tables, count, block=NEWS, num_warps=4)

    def attend(self, query: Tensor, cache: LayerCache, options: AttentionOptions) -> Tensor:
        if max(query.shape[-1], cache.values.shape[-1]) > MAX_DIM:
            return self._fallback.attend(query, cache, options)
        query = query if query.stride(-1) == 1 else query.contiguous()
        out = query.new_empty(*query.shape[:2], cache.values.shape[-1])
        call = AttentionCall(query, cache, options, out, self.machine)
        with self.machine.chosen():
            self._attend_short(call)
            self._attend_long(call)
        return out  # [T, Hq, Dv]

    def _attend_short(self, call: AttentionCall) -> None:
        layout, sequences, works, *_ = self._parts()
        tables, width = self.tables, self.seats.width
        shape = (call.num_heads, call.value_dim)
        sizes = call.sizes(is_short=True)
        for turn in turns(layout.short, MAX_PART_BYTES // (4 * call.num_heads * call.value_dim)):
            sums = call.out.new_empty(turn.num_parts, *shape, dtype=torch.float32)
            peaks = call.out.new_empty(turn.num_parts, call.num_heads, dtype=torch.float32)
            totals = torch.empty_like(peaks)
            grid = (turn.num_works, call.kv_heads, -(-turn.longest * call.group // sizes["block_rows"]))
            self.kernels.attend_part[grid](
                *call.inputs(sequences, works, tables, sums, peaks, totals),
                turn.first_work,
                turn.first_part,
                *call.strides,
                width,
                *call.numbers,
                chunk=CHUNK,
                **sizes,
            )
            self.kernels.join_parts[(turn.last - turn.first, turn.longest, call.num_heads)](
                sums,
                peaks,
                totals,
                sequences,
                call.sinks,
                call.out,
                turn.first,
                turn.first_part,
                call.out.stride(0),
                call.window,
                value_dim=call.value_dim,
                chunk=CHUNK,
                block_value=sizes["block_value"],
                has_sinks=call.has_sinks,
                num_warps=JOIN_WARPS,
            )

    def _attend_long(self, call: AttentionCall) -> None:
        parts = self._parts()
        layout, num_tiles = parts.layout, parts.layout.num_tiles
        kernel = self.prompts
        if layout.prompts and kernel is not None and kernel.takes(call.options, call.dim, call.value_dim):
            num_tiles -= sum(prompt.num_tiles for prompt in layout.prompts)
            self._attend_prompts(call, kernel)
        if num_tiles:
            self.attend_tiles(call, parts.sequences, parts.tiles, num_tiles)

    def attend_tiles(self, call: AttentionCall, sequences: Tensor, tiles: Tensor, count: int) -> None:
        """Compute the first `count` of `tiles` of long chunks by bridle's Triton kernel."""
        sizes = call.sizes(is_short=False)
        grid = (TILE * call.group // sizes["block_rows"], call.kv_heads, count)
        self.kernels.attend_whole[grid](
            *call.inputs(sequences, tiles, self.tables, call.sinks, call.out),
            *call.strides,
            self.seats.width,
            call.out.stride(0),
            *call.numbers,
            has_sinks=call.has_sinks,
            tile=TILE,
            **sizes,
        )

    def _attend_prompts(self, call: AttentionCall, kernel: PromptKernel) -> None:
        layout, tables = self._layout, self.tables
        assert layout is not None
        assert tables is not None
        for offset, length, context, seat, _ in layout.prompts:
            keys, values = call.gathered(tables[seat], context)
            part = slice(offset, offset + length)
            call.out[part] = kernel.attend(call.query[part], keys, values, call.options)

    def _parts(self) -> LayoutParts:
        layout, words = self._layout, self.packed_words
        assert layout is not None
        assert words is not None
        works = aligned(5 * layout.num_sequences, 4)
        tiles = works + aligned(2 * layout.num_works, 4)
        news = tiles + aligned(2 * layout.num_tiles, 4)
        return LayoutParts(layout, words[:works], words[works:tiles], words[tiles:news], words[news:])
