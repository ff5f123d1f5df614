"""DRY, "don't repeat yourself" (p-e-w, text-generation-webui pull request 5677, 2024): a penalty that grows with the
length of the repetition that a token would continue.

Suppose that the last tokens of a sequence also occur earlier in the sequence, followed by token t. Then the logit of t
is reduced by multiplier * base ** (length - allowed_length). In this formula, length is the number of tokens in the
longest such repetition. If the length is below `allowed_length`, the logit is unchanged. No repetition is counted
across a sequence breaker. Lengths above 50 count as 50, as in the original, which bounds the work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from bridle.engine.interfaces import HistoryLookup
from bridle.engine.scheduling.step_plan import SampleRow
from bridle.model.h2d_copies import upload
from bridle.model.sampling.penalties import Histories, IntArray
from bridle.sampling import SamplingParams

_MAX_LENGTH = 50
_MAX_PENALTY = 1e30  # more than any logit, and finite in float32
_CACHED_BREAKERS = 64


class Dry:
    """Applies the DRY penalty. The sequence breakers of a `SamplingParams` are sorted once, not at every step."""

    def __init__(self) -> None:
        self._breakers: OrderedDict[int, tuple[SamplingParams, IntArray]] = OrderedDict()

    def apply(
        self, work: torch.Tensor, rows: Sequence[SampleRow], history: HistoryLookup, known: Histories, vocab: int
    ) -> None:
        """Penalize, in place, the tokens that would continue a repetition. `work` is [len(rows), W]."""
        places: list[npt.NDArray[np.int64]] = []
        penalties: list[npt.NDArray[np.float32]] = []
        for i in [i for i, row in enumerate(rows) if row.sampling.has_dry]:
            sampling = rows[i].sampling
            array = known.array(rows[i].seq_id, history(rows[i])[0])
            if sampling.dry_penalty_last_n > 0:
                array = array[-sampling.dry_penalty_last_n :]
            tokens, lengths = repetitions(array, self._of(sampling))
            counts = (lengths >= sampling.dry_allowed_length) & (tokens < vocab)
            excess = (lengths[counts] - sampling.dry_allowed_length).astype(np.float64)
            places.append(i * work.shape[1] + tokens[counts])
            loss = np.minimum(sampling.dry_multiplier * sampling.dry_base**excess, _MAX_PENALTY)
            penalties.append(loss.astype(np.float32))
        if places:
            index = upload(np.concatenate(places), work.device)
            work.view(-1)[index] -= upload(np.concatenate(penalties), work.device)  # each index occurs once

    def _of(self, sampling: SamplingParams) -> IntArray:
        found = self._breakers.pop(id(sampling), None)
        if found is None:
            found = sampling, np.unique(np.array(sampling.dry_breaker_ids, dtype=np.int64))
        self._breakers[id(sampling)] = found  # keeps the object alive, so that its id is not reused
        if len(self._breakers) > _CACHED_BREAKERS:
            self._breakers.popitem(last=False)
        return found[1]


def repetitions(tokens: IntArray, breakers: IntArray) -> tuple[IntArray, IntArray]:
    """Return the tokens that would continue a repetition, each once, and the length of the longest repetition that each
    would continue. `breakers` are sorted."""
    size = len(tokens)
    if size < 2 or _are_in(tokens[-1:], breakers)[0]:
        return tokens[:0], tokens[:0]
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # earlier positions of the last token
    ends = ends[~_are_in(tokens[ends + 1], breakers)]
    lengths = np.ones(len(ends), dtype=np.int64)
    left = np.arange(len(ends))
    for back in range(1, min(_MAX_LENGTH, size)):
        mine = tokens[size - 1 - back : size - back]
        if _are_in(mine, breakers)[0]:
            break
        before = ends[left] - back
        left = left[(before >= 0) & (tokens[before] == mine)]
        if not len(left):
            break
        lengths[left] = back + 1
    following = tokens[ends + 1]
    order = np.lexsort((lengths, following))  # the longest repetition of each token comes last
    following, lengths = following[order], lengths[order]
    is_last = np.append(following[1:] != following[:-1], True)[: len(following)]
    return following[is_last], lengths[is_last]


def _are_in(tokens: IntArray, breakers: IntArray) -> npt.NDArray[np.bool_]:
    if not len(breakers):
        return np.zeros(len(tokens), dtype=np.bool_)
    place = np.searchsorted(breakers, tokens)
    found: npt.NDArray[np.bool_] = breakers[np.minimum(place, len(breakers) - 1)] == tokens
    return found
