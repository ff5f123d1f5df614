"""Rows of logits with what is known of them, so that nobody goes through them twice.

A row over a large vocabulary takes longer to go through than all that is then done with what was found. So what a draw
counted is handed on to those who tell of it: the largest value of each chunk, and the total of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bridle.model.sampling.extremes import chunk_maxima
from bridle.model.sampling.rows import pick
from bridle.model.sampling.weights import take_totals


@dataclass(slots=True)
class Seen:
    """Rows `work` [R, W] and their `chunk_maxima` [R, W / CHUNK]. Row i has the weights `totals[i]` [1] if
    `is_counted[i]`."""

    work: torch.Tensor
    maxima: torch.Tensor
    totals: torch.Tensor  # float64 [R, 1]
    is_counted: list[bool]

    @classmethod
    def of(cls, work: torch.Tensor) -> Seen:
        """Rows of which nothing else is known."""
        num_rows = work.shape[0]
        return cls(work, chunk_maxima(work), work.new_zeros(num_rows, 1, dtype=torch.float64), [False] * num_rows)

    @property
    def largest(self) -> torch.Tensor:
        """The largest value of each row [R, 1]."""
        return self.maxima.amax(1, keepdim=True)

    def rows(self, indices: Sequence[int]) -> Seen:
        """Some of the rows: copies, or views where they are a run."""
        work, maxima, totals = (pick(each, indices) for each in (self.work, self.maxima, self.totals))
        return Seen(work, maxima, totals, [self.is_counted[i] for i in indices])

    def take_totals(self) -> torch.Tensor:
        """The totals of all rows; those that are not known are counted, and `work` is then used up."""
        if not any(self.is_counted):
            return take_totals(self.work, self.largest)
        missing = [i for i, is_known in enumerate(self.is_counted) if not is_known]
        if missing:
            rest = self.rows(missing)
            self.totals[missing] = take_totals(rest.work, rest.largest)
        return self.totals
