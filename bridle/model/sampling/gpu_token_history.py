"""Keeps the token histories for penalties on the device. A step uploads only the tokens that a sequence received since
it was last sampled. The kernel that counts tokens appends them to the history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from bridle.model.sampling.penalties import Known

#: Maximum memory, in words of 4 bytes. The histories of sequences without a row are uploaded whole.
MAX_WORDS = 1 << 23
_MIN_WIDTH, _MIN_ROWS = 256, 16


class HistoryRow(NamedTuple):
    """The position of a sequence's row in the device's memory (-1: none), and the number of tokens in this row."""

    base: int
    num_kept: int


class DeviceTokenHistory:
    """Token histories on one device, with one row of memory per sequence, for the most recently sampled sequences."""

    def __init__(self, device: torch.device, max_words: int = MAX_WORDS) -> None:
        self._device, self._max_words = device, max_words
        self._width, self._num_rows, self._step = _MIN_WIDTH, 0, 0
        self._owners: list[Known] = []  # of the first rows; the other rows are free
        self._placed: list[tuple[Known, int]] = []
        self.words = torch.empty(_MIN_WIDTH, dtype=torch.int32, device=device)  # [rows * width]

    def place(self, owners: Sequence[Known | None], lengths: Sequence[int]) -> list[HistoryRow]:
        """Assign a row of memory to each history of a step; `lengths` are the numbers of tokens."""
        self._placed = []
        if not owners:
            return []
        self._reserve(len(owners), max(lengths))
        self._step += 1
        for owner in owners:  # first, so that none of their rows is given to another sequence
            if owner is not None and self._has_row(owner):
                owner.last_step = self._step
        return [self._place(owner, length) for owner, length in zip(owners, lengths, strict=True)]

    def keep(self) -> None:
        """Record that the kernel was launched that stores the tokens of the last `place` call."""
        for owner, length in self._placed:
            owner.num_kept = length

    def _reserve(self, num_rows: int, length: int) -> None:
        """Grow the memory by doubling, if necessary. If the memory grows, all sequences lose their rows of memory."""
        width, rows = self._width, max(self._num_rows, _MIN_ROWS)
        while width < length:
            width *= 2
        while rows < num_rows:
            rows *= 2
        rows = min(rows, self._max_words // width)
        if (width, rows) != (self._width, self._num_rows):
            self._width, self._num_rows, self._owners = width, rows, []
            self.words = torch.empty(max(rows * width, 1), dtype=torch.int32, device=self._device)

    def _place(self, owner: Known | None, length: int) -> HistoryRow:
        if owner is None or not (self._has_row(owner) or self._give_row(owner)):
            return HistoryRow(-1, 0)
        self._placed.append((owner, length))
        return HistoryRow(owner.row * self._width, owner.num_kept)

    def _has_row(self, owner: Known) -> bool:
        return owner.row < len(self._owners) and self._owners[owner.row] is owner

    def _give_row(self, owner: Known) -> bool:
        """Give the sequence `owner` a free row of memory, or the row of the least recently sampled sequence. Return
        False if there is no such row."""
        if len(self._owners) < self._num_rows:
            owner.row = len(self._owners)
            self._owners.append(owner)
        else:
            oldest = min(self._owners, key=lambda each: each.last_step, default=None)
            if oldest is None or oldest.last_step == self._step:
                return False
            owner.row = oldest.row
            self._owners[owner.row] = owner
        owner.num_kept, owner.last_step = 0, self._step
        return True
