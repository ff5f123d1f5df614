"""Rows of logits with what is known of them, so that nobody goes through them twice.

A row over a large vocabulary takes longer to go through than all that is then done with what was found. So what a draw
counted is handed on to those who tell of it: the largest value of each chunk, and the total of the weights. The best
tokens are looked for before the draw, while a cache still has the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bridle.model.sampling.extremes import best_of
from bridle.model.sampling.rows import pick
from bridle.model.sampling.weights import take_totals


@dataclass(slots=True)
class Seen:
    """Rows `work` [R, W], their `chunk_maxima` [R, W / CHUNK], and their `best` values with the places of these, [R, n]
    each. Row i has the weights `totals[i]` [1] if `is_counted[i]`."""

    work: torch.Tensor
    maxima: torch.Tensor
    best: torch.Tensor
    places: torch.Tensor
    totals: torch.Tensor  # float64 [R, 1]
    is_counted: list[bool]

    @classmethod
    def of(cls, work: torch.Tensor, num_best: int) -> Seen:
        """Rows of which nothing else is known, with that many of their best values."""
        num_rows = work.shape[0]
        totals = work.new_zeros(num_rows, 1, dtype=torch.float64)
        return cls(work, *best_of(work, num_best), totals, [False] * num_rows)

    def count(self, index: torch.Tensor, totals: torch.Tensor, is_counted: list[bool]) -> None:
        """Note the `totals` [n, 1] of the rows `index` [n], and of which rows they are those of the weights."""
        if len(index) == len(is_counted):
            self.totals = totals
        else:
            self.totals[index] = totals
        self.is_counted = is_counted

    @property
    def largest(self) -> torch.Tensor:
        """The largest value of each row [R, 1]."""
        return self.maxima.amax(1, keepdim=True)

    def rows(self, indices: Sequence[int]) -> Seen:
        """Some of the rows: copies, or views where they are a run."""
        if len(indices) == len(self.is_counted):
            return self
        known = (self.work, self.maxima, self.best, self.places, self.totals)
        work, maxima, best, places, totals = (pick(each, indices) for each in known)
        return Seen(work, maxima, best, places, totals, [self.is_counted[i] for i in indices])

    def take_totals(self) -> torch.Tensor:
        """The totals of all rows; those that are not known are counted, and `work` is then used up."""
        missing = [i for i, is_known in enumerate(self.is_counted) if not is_known]
        if len(missing) == len(self.is_counted):
            return take_totals(self.work, self.largest)
        if missing:
            rest = self.rows(missing)
            self.totals[missing] = take_totals(rest.work, rest.largest)
        return self.totals
