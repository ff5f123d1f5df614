"""The numbers of a step at fixed places of a device, where a captured graph reads them.

Every token is a row of its own: a sequence of one token behind those before it, whose keys and values are written
before any row attends. So decodes, forced tokens, rewound tails and short chunks are alike, and a step is described by
how many tokens it has. It is filled up with tokens of a sequence that is nobody's, in a block that is nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bridle.model.batch_inputs import PackedRow, PackedStep
from bridle.model.h2d_copies import Staging, aligned, upload
from bridle.model.kernels import paged
from bridle.model.kernels.paged import PagedKernel
from bridle.model.kernels.rows import NEWS_ROOM, RowNumbers, num_words, parts_of
from bridle.model.sequence_state import CachedRequestState

#: Ids, positions, slots and logits rows.
_COLUMNS = 4


@dataclass(frozen=True, slots=True)
class StepCapacity:
    """Capacity of steps: tokens, and attention works."""

    num_tokens: int
    num_works: int


class StaticStep:
    """One step's numbers, for steps of any size up to `room`. `spare_block` is a block that no sequence is given."""

    def __init__(
        self, kernel: PagedKernel, room: StepCapacity, block_size: int, spare_block: int, device: torch.device
    ) -> None:
        self._kernel, self._room, self._block_size = kernel, room, block_size
        size = _COLUMNS * aligned(room.num_tokens, 8) + -(-num_words(room.num_tokens, room.num_works) // 2)
        self.words = torch.zeros(size, dtype=torch.int64, device=device)
        self._staging = Staging(self.words)
        nobody = CachedRequestState()
        nobody.tokens = [0]
        nobody.add_blocks([spare_block])
        self._filler = PackedRow(0, 1, 1, [], nobody)
        self._spare = spare_block

    def view(self, size: int) -> PackedStep:
        """The inputs of a forward pass over `size` tokens, all of which give logits."""
        columns = _columns(self.words, size)
        return PackedStep(
            input_ids=columns[0].unsqueeze(0),
            position_ids=columns[1].unsqueeze(0),
            slots=columns[2],
            logits_rows=columns[3],
            rows=[],
            block_size=self._block_size,
        )

    def numbers(self, size: int) -> RowNumbers:
        """What attention reads for them."""
        return parts_of(self.words[_COLUMNS * aligned(size, 8) :].view(torch.int32), size)

    def takes(self, rows: Sequence[PackedRow]) -> bool:
        """Return whether these are rows of short chunks without images, whose block tables fit."""
        seats = self._kernel.seats
        if len(rows) >= seats.num_seats:  # one is for filling up
            return False
        longest = seats.width * self._block_size
        return all(row.length <= paged.MAX_SHORT and row.context <= longest and not row.mirror.media for row in rows)

    def write(
        self,
        size: int,
        ids: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        logits: Sequence[int],
        rows: Sequence[PackedRow],
    ) -> bool:
        """Bring the numbers of a step, filled up to `size` tokens, to the device. False, and nothing is done, where it
        has too many works."""
        num_missing = size - len(ids)
        columns = np.zeros((_COLUMNS, size), np.int64)
        columns[2] = self._spare * self._block_size
        for column, values in zip(columns, (ids, positions, slots, logits), strict=True):
            column[: len(values)] = values
        chunks = columns[1] // paged.CHUNK + 1
        num_works = int(chunks.sum())
        if num_works > self._room.num_works:
            return False
        numbers, news = self._kernel.seats.place([*rows, self._filler], self._block_size)
        seats = np.repeat(numbers, [*(row.length for row in rows), num_missing])
        words = self._staging.take()
        _columns(words, size)[:] = columns
        start = _COLUMNS * aligned(size, 8)
        parts = parts_of(words[start:].view(np.int32), size)
        self._write_news(parts.news, news, numbers[-1])
        _write_rows(parts, columns[1], chunks, seats)
        self._staging.send(start + -(-num_words(size, num_works) // 2))
        return True

    def _write_news(self, room: npt.NDArray[np.int32], news: npt.NDArray[np.int32], seat: int) -> None:
        """The rest of the room tells the page of the sequence that is nobody's, over and over."""
        if len(news) > NEWS_ROOM:
            device = self.words.device
            self._kernel.take(upload(np.ascontiguousarray(news[NEWS_ROOM:]), device), len(news) - NEWS_ROOM)
        count = min(len(news), NEWS_ROOM)
        room[:count] = news[:count]
        room[count:] = (seat * self._kernel.seats.width, self._spare)


def _columns(words: Any, size: int) -> Any:
    """The columns of `words`, a tensor or an array, each at an aligned place."""
    step = aligned(size, 8)
    return words[: _COLUMNS * step].reshape(_COLUMNS, step)[:, :size]


def _write_rows(
    parts: RowNumbers, positions: npt.NDArray[np.int64], chunks: npt.NDArray[np.int64], seats: npt.NDArray[np.int64]
) -> None:
    """Each token as a sequence, and its works."""
    size, num_works = len(positions), int(chunks.sum())
    firsts = np.cumsum(chunks) - chunks
    parts.counts[:] = num_works
    sequences = parts.sequences
    sequences[:, 0], sequences[:, 1], sequences[:, 2] = np.arange(size), 1, positions + 1
    sequences[:, 3], sequences[:, 4] = firsts, seats
    parts.works[:num_works, 0] = np.repeat(np.arange(size), chunks)
    parts.works[:num_works, 1] = np.arange(num_works) - np.repeat(firsts, chunks)
