"""The inputs of a step at fixed device addresses, where a captured CUDA graph reads them. Every token is a separate
row, like a sequence with one new token. All keys and values are written before attention runs. Decode tokens, forced
tokens and short chunks are therefore handled in the same way, and a graph depends only on the number of tokens. A step
is padded with tokens of a dummy sequence, in a dummy block. In graphs for long chunks, each long chunk has an entry of
its own, and its tokens are rows of length 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bridle.model.batch_inputs import PackedRow, PackedStep
from bridle.model.h2d_copies import Staging, aligned, upload
from bridle.model.kernels import paged
from bridle.model.kernels.paged import PagedKernel
from bridle.model.kernels.rows import NEWS_ROOM, RowNumbers, StepShape, num_words, parts_of
from bridle.model.sequence_state import CachedRequestState

#: The columns are ids, positions, slots and logits rows.
_COLUMNS = 4
#: The index of a tile after the end of every chunk; its programs end at once.
_NO_TILE = 1 << 16

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepCapacity:
    """Capacity of all captured steps: the largest shape, and the maximum number of attention works."""

    shape: StepShape
    num_works: int


class StaticStep:
    """Device memory for the inputs of one step, of any shape within `room`. `spare_block` is a block that no sequence
    uses."""

    def __init__(
        self, kernel: PagedKernel, room: StepCapacity, block_size: int, spare_block: int, device: torch.device
    ) -> None:
        self._kernel, self._room, self._block_size = kernel, room, block_size
        size = _COLUMNS * aligned(room.shape.num_tokens, 8) + -(-num_words(room.shape, room.num_works) // 2)
        self.words = torch.zeros(size, dtype=torch.int64, device=device)
        self._staging = Staging(self.words)
        nobody = CachedRequestState()
        nobody.tokens = [0]
        nobody.add_blocks([spare_block])
        self._filler = PackedRow(0, 1, 1, [], nobody)
        self._spare = spare_block

    def view(self, shape: StepShape) -> PackedStep:
        """Return the inputs of a forward pass of this shape, as views of the device memory."""
        columns = _columns(self.words, shape.num_tokens)
        return PackedStep(
            input_ids=columns[0].unsqueeze(0),
            position_ids=columns[1].unsqueeze(0),
            slots=columns[2],
            logits_rows=columns[3][: shape.num_logits],
            rows=[],
            block_size=self._block_size,
        )

    def numbers(self, shape: StepShape) -> RowNumbers:
        """Return the tensors that attention reads for a step of this shape, as views of the device memory."""
        return parts_of(self.words[_COLUMNS * aligned(shape.num_tokens, 8) :].view(torch.int32), shape)

    def takes(self, rows: Sequence[PackedRow]) -> bool:
        """Return whether these rows can be written: they have no images, and their block tables fit."""
        seats = self._kernel.seats
        if len(rows) >= seats.num_seats:  # one row is for the padding
            return False
        longest = seats.width * self._block_size
        return all(row.context <= longest and not row.mirror.media for row in rows)

    def write(
        self,
        shape: StepShape,
        ids: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        logits: Sequence[int],
        rows: Sequence[PackedRow],
    ) -> bool:
        """Copy the inputs of a step, padded to `shape`, to the device. Return False, and change nothing, if the step
        has too many works, long chunks or logits rows for the graph."""
        size = shape.num_tokens
        lengths = np.array([*(row.length for row in rows), size - len(ids)])
        is_long = np.array([*(row.length > paged.MAX_SHORT for row in rows), False])
        columns = self._columns_of(size, ids, positions, slots, logits)
        chunks = np.where(np.repeat(is_long, lengths), 0, columns[1] // paged.CHUNK + 1)
        num_works = int(chunks.sum())
        if num_works > self._room.num_works or is_long.sum() > shape.num_long or len(logits) > shape.num_logits:
            return False
        numbers, news = self._kernel.seats.place([*rows, self._filler], self._block_size)
        words = self._staging.take()
        _columns(words, size)[:] = columns
        start = _COLUMNS * aligned(size, 8)
        parts = parts_of(words[start:].view(np.int32), shape)
        self._write_news(parts.news, news, numbers[-1])
        _write_rows(parts, columns[1], chunks, np.repeat(numbers, lengths))
        _write_long(parts, [*compress(zip(rows, numbers, strict=False), is_long)])
        self._staging.send(start + -(-num_words(shape, num_works) // 2))
        return True

    def _columns_of(self, size: int, *found: Sequence[int]) -> Ints:
        """Return ids, positions, slots and logits rows, padded to `size` with values of the dummy sequence."""
        columns = np.zeros((_COLUMNS, size), np.int64)
        columns[2] = self._spare * self._block_size
        for column, values in zip(columns, found, strict=True):
            column[: len(values)] = values
        return columns

    def _write_news(self, room: npt.NDArray[np.int32], news: npt.NDArray[np.int32], seat: int) -> None:
        """Write new pages of the block table. Unused entries repeat the page of the dummy sequence."""
        if len(news) > NEWS_ROOM:
            device = self.words.device
            self._kernel.take(upload(np.ascontiguousarray(news[NEWS_ROOM:]), device), len(news) - NEWS_ROOM)
        count = min(len(news), NEWS_ROOM)
        room[:count] = news[:count]
        room[count:] = (seat * self._kernel.seats.width, self._spare)


def _columns(words: Any, size: int) -> Any:
    """Return the columns of `words`, a tensor or an array, each at an aligned offset."""
    step = aligned(size, 8)
    return words[: _COLUMNS * step].reshape(_COLUMNS, step)[:, :size]


def _write_rows(parts: RowNumbers, positions: Ints, chunks: Ints, seats: Ints) -> None:
    """Write the entry of each token, as a sequence with one new token, and the token's attention works. Tokens of long
    chunks have length 0 and no works."""
    size, num_works = len(positions), int(chunks.sum())
    firsts = np.cumsum(chunks) - chunks
    parts.counts[:] = num_works
    sequences = parts.sequences
    sequences[:, 0], sequences[:, 1], sequences[:, 2] = np.arange(size), chunks > 0, positions + 1
    sequences[:, 3], sequences[:, 4] = firsts, seats
    parts.works[:num_works, 0] = np.repeat(np.arange(size), chunks)
    parts.works[:num_works, 1] = np.arange(num_works) - np.repeat(firsts, chunks)


def _write_long(parts: RowNumbers, chunks: Sequence[tuple[PackedRow, int]]) -> None:
    """Write the long chunks with their rows of the block table, and their tiles. Unused tiles have the number of a
    chunk that does not exist, so that their programs end at once."""
    parts.long[:] = 0
    for number, (row, seat) in enumerate(chunks):
        parts.long[number] = row.offset, row.length, row.context, 0, seat
    tiles = paged.tiles_of([row.length for row, _ in chunks], 0)
    parts.tiles[: len(tiles)] = tiles
    parts.tiles[len(tiles) :] = 0, _NO_TILE
