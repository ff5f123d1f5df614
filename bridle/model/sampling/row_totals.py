"""Rows of logits with their total weights, so that a total is computed only once. Reading a row over a large vocabulary
takes longer than all later work. Totals that sampling computed are therefore reused for log-probabilities and traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bridle.model.sampling.fixed_point_probs import take_totals
from bridle.model.sampling.rows import pick

#: The total that a kernel gets for a row whose total is not known.
UNKNOWN = -1.0


@dataclass(slots=True)
class RowTotals:
    """Rows of logits `work` [R, W]. If `is_counted[i]`, the total weight of row i is `totals[i]` [1], float64."""

    work: torch.Tensor
    totals: torch.Tensor | None = None  # None if no row is counted
    is_counted: Sequence[bool] = ()

    def count(self, index: torch.Tensor, totals: torch.Tensor, is_counted: Sequence[bool]) -> None:
        """Record the total weights `totals` [n, 1] of the rows with the numbers `index` [n]. `is_counted` says for all
        rows whether their total weight is now known."""
        self.totals, self.is_counted = totals, is_counted
        if len(index) < len(is_counted):
            self.totals = totals.new_empty(len(is_counted), 1)
            self.totals[index] = totals

    def rows(self, indices: Sequence[int]) -> RowTotals:
        """Return some of the rows: views if they are contiguous, otherwise copies."""
        if len(indices) == len(self.work):
            return self
        if self.totals is None:
            return RowTotals(pick(self.work, indices))
        return RowTotals(pick(self.work, indices), pick(self.totals, indices), [self.is_counted[i] for i in indices])

    def known_totals(self) -> torch.Tensor:
        """Return the total weights of all rows; `UNKNOWN` for rows whose total weight was not computed."""
        if self.totals is None:
            return self.work.new_full((len(self.work), 1), UNKNOWN, dtype=torch.float64)
        if not all(self.is_counted):
            self.totals[self._missing()] = UNKNOWN
        return self.totals

    def take_totals(self, largest: torch.Tensor) -> torch.Tensor:
        """Return the total weights of all rows; `largest` [R, 1] are the largest logits of the rows. Rows whose total
        weight was not computed before are overwritten."""
        missing = self._missing()
        if self.totals is None or len(missing) == len(self.work):
            return take_totals(self.work, largest)
        if missing:
            self.totals[missing] = take_totals(pick(self.work, missing), pick(largest, missing))
        return self.totals

    def _missing(self) -> list[int]:
        return [i for i, is_known in enumerate(self.is_counted) if not is_known]
