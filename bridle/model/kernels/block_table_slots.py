"""Manages the rows of the block table on a device: which sequence has which row, and which pages must be uploaded. A
page is the number of a KV block. A sequence keeps its row from step to step, so that only its new pages are uploaded.
If all table rows are in use, the least recently used row is reused, and the former sequence's pages are uploaded again
when it runs. This module uses no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bridle.model.batch_inputs import PackedRow
from bridle.model.sequence_state import BlockTableRow

#: Rows and pages of the smallest table.
LEAST_SEATS, LEAST_WIDTH = 64, 16


class BlockTableSlots:
    """The rows of a block table with `num_seats` rows of `width` pages, which grows when a step needs more."""

    def __init__(self) -> None:
        self.num_seats, self.width = LEAST_SEATS, LEAST_WIDTH
        self._seats: list[BlockTableRow] = []
        self._step = 0

    def place(self, rows: Sequence[PackedRow], block_size: int) -> tuple[list[int], npt.NDArray[np.int32]]:
        """Assign a table row to each batch row. Return the table rows, and the pages to upload as [U, 2]: flat index in
        the table, and page."""
        needed = [-(-row.context // block_size) for row in rows]
        self.reserve(len(rows), max(needed))
        self._step += 1
        for row in rows:  # first, so that none of their rows is given to another sequence
            if self._is_seated(row):
                row.mirror.seat.last_step = self._step  # type: ignore[union-attr]
        seats = [self._seat(row) for row in rows]
        news = [self._tell(seat, row, count) for seat, row, count in zip(seats, rows, needed, strict=True)]
        return [seat.number for seat in seats], np.concatenate(news)

    def reserve(self, num_rows: int, num_pages: int) -> None:
        """Grow the table by doubling until it has `num_rows` x `num_pages` pages. If the table grows, all sequences
        lose their table rows, because the new table is empty."""
        num_seats, width = self.num_seats, self.width
        while self.num_seats < num_rows:
            self.num_seats *= 2
        while self.width < num_pages:
            self.width *= 2
        if (num_seats, width) != (self.num_seats, self.width):
            self._seats.clear()

    def _is_seated(self, row: PackedRow) -> bool:
        seat = row.mirror.seat
        return seat is not None and seat.number < len(self._seats) and self._seats[seat.number] is seat

    def _seat(self, row: PackedRow) -> BlockTableRow:
        if self._is_seated(row):
            assert row.mirror.seat is not None
            return row.mirror.seat
        if len(self._seats) < self.num_seats:
            seat = BlockTableRow(len(self._seats), self._step)
            self._seats.append(seat)
        else:
            oldest = min(self._seats, key=lambda each: each.last_step)
            seat = self._seats[oldest.number] = BlockTableRow(oldest.number, self._step)
        row.mirror.seat = seat
        return seat

    def _tell(self, seat: BlockTableRow, row: PackedRow, count: int) -> npt.NDArray[np.int32]:
        """Return the pages of a batch row, up to page `count`, that were not uploaded yet, as [U, 2]. Record these
        pages as uploaded."""
        first = seat.num_told
        if count <= first:
            return np.empty((0, 2), np.int32)
        seat.num_told = count
        news = np.empty((count - first, 2), np.int32)
        news[:, 0] = np.arange(first, count) + seat.number * self.width
        news[:, 1] = np.frombuffer(row.mirror.blocks, np.int32)[first:count]
        return news
