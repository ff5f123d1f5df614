"""The distributions from which traced tokens were sampled: the model's own distribution, and the distribution after
mask and bias. The distributions of all traced rows of a step are computed together, from results of the sampler if the
sampler kept them. A distribution is stored as arrays, and converted to a `Draw` only when a reader needs it, which may
be long after the step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt
import torch

from bridle.engine.scheduling.step_plan import SampleRow
from bridle.model.sampling.fixed_point_probs import totals, weights_of
from bridle.model.sampling.logprobs import LogprobQuery, place_of, survey
from bridle.model.sampling.row_totals import RowTotals
from bridle.model.sampling.rows import gather
from bridle.model.sampling.topk import count_above
from bridle.traces import Draw, Odds


@dataclass(slots=True)
class RowProvenance:
    """The distributions from which the tokens of some rows were sampled. For rows that mask or bias changed, `after` is
    the distribution after this change. For changed rows, `shares` [R, 2] has the number of allowed tokens and the
    removed probability. Row i is reported with its `sizes[i]` best tokens."""

    before: LogprobQuery
    sizes: list[int]
    vocab: int
    after: LogprobQuery | None = None
    shares: npt.NDArray[np.float64] | None = None

    def draw(self, i: int) -> Draw:
        before = self._odds(self.before, i)
        if self.after is None or self.shares is None:
            return Draw(before)
        num_allowed, taken = self.shares[i].tolist()
        return Draw(before, self._odds(self.after, i), None if num_allowed >= self.vocab else int(num_allowed), taken)

    def _odds(self, survey: LogprobQuery, i: int) -> Odds:
        logprob, top, rank = place_of(survey.places[i].tolist(), self.sizes[i])
        return Odds(logprob, rank, top)


class TracedDraws(Sequence[Draw | None]):
    """A sequence with a `Draw` for each row of a step, which is created when it is read. A row that is not traced or
    has no sampled token has None."""

    def __init__(self, num_rows: int = 0) -> None:
        self._num_rows = num_rows
        self._told: list[tuple[int, Sequence[int], RowProvenance]] = []  # first row, indices of rows, distributions

    def add(self, indices: Sequence[int], found: RowProvenance) -> None:
        """Record the distributions of rows `indices`."""
        self._told.append((0, indices, found))

    def extend(self, other: TracedDraws) -> None:
        """Append the rows of the other object `other`."""
        self._told += [(self._num_rows + start, indices, found) for start, indices, found in other._told]
        self._num_rows += other._num_rows

    def __len__(self) -> int:
        return self._num_rows

    @overload
    def __getitem__(self, i: int) -> Draw | None: ...

    @overload
    def __getitem__(self, i: slice) -> list[Draw | None]: ...

    def __getitem__(self, i: int | slice) -> Draw | list[Draw | None] | None:
        if isinstance(i, slice):
            return [self[each] for each in range(*i.indices(self._num_rows))]
        place = range(self._num_rows)[i]  # raises `IndexError`
        for start, indices, found in self._told:
            slot = bisect_left(indices, place - start)
            if slot < len(indices) and indices[slot] == place - start:
                return found.draw(slot)
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def traced_draws(
    logits: torch.Tensor,
    rows: Sequence[SampleRow],
    tokens: Sequence[int],
    steered: Mapping[int, torch.Tensor],
    seen: RowTotals | None,
) -> TracedDraws:
    """Return the distributions from which `tokens` were sampled, for the traced `rows` of `logits` [R, V]. `steered`
    has the logits [W] of the rows that mask or bias changed. `seen` has the logits of all rows after mask and bias, if
    the sampler kept them; this call overwrites `seen`. A row without a sampled token has no distribution."""
    draws = TracedDraws(len(rows))
    traced = [i for i, row in enumerate(rows) if row.num_traced and tokens[i] >= 0]
    vocab = logits.shape[-1]
    plain = [i for i in traced if i not in steered] if steered else traced
    if plain:
        sizes = [rows[i].num_traced for i in plain]
        own = RowTotals(_own(logits, rows, plain)) if seen is None else seen.rows(plain)
        draws.add(plain, RowProvenance(survey(own, [tokens[i] for i in plain], min(max(sizes), vocab)), sizes, vocab))
    changed = [i for i in traced if i in steered]
    if changed:
        own = RowTotals(_own(logits, rows, changed))
        after = RowTotals(torch.stack([steered[i] for i in changed])) if seen is None else seen.rows(changed)
        draws.add(changed, _changes(own, after, [rows[i] for i in changed], [tokens[i] for i in changed], vocab))
    return draws


def _own(logits: torch.Tensor, rows: Sequence[SampleRow], indices: Sequence[int]) -> torch.Tensor:
    """Return copies of the model's own logits [len(indices), W]."""
    return gather(logits, [rows[i].logits_index for i in indices])


def _changes(
    own: RowTotals, after: RowTotals, rows: Sequence[SampleRow], tokens: Sequence[int], vocab: int
) -> RowProvenance:
    """Return the distributions of `rows` before and after mask and bias. `own` are the model's own logits [C, W], and
    `after` the logits after mask and bias."""
    is_biased = any(row.bias or row.sampling.logit_bias for row in rows)
    num_allowed = count_above(after.work, after.work.new_full((len(rows), 1), -torch.inf))  # [C, 1]
    gone = _gone(own, after) if is_biased else None
    sizes = [row.num_traced for row in rows]
    before, left = (survey(each, tokens, min(max(sizes), vocab)) for each in (own, after))
    total = before.totals
    if gone is None:  # tokens that a mask allows keep their weights, but these are relative to another largest logit
        gone = total - left.totals * (left.largest - before.largest).exp()
    taken = (gone / total).clamp(0.0, 1.0)  # [C, 1]
    shares = torch.cat((num_allowed.double(), taken), 1)
    return RowProvenance(before, sizes, vocab, left, shares.cpu().numpy())


def _gone(own: RowTotals, after: RowTotals) -> torch.Tensor:
    """Return for each row the total weight that now forbidden tokens have in the model's own distribution: float64 [C,
    1]."""
    weights = weights_of(own.work - own.work.amax(1, keepdim=True))
    return totals(weights.masked_fill_(after.work > -torch.inf, 0.0)).unsqueeze(1)
