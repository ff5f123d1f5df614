"""Log-probabilities of sampled tokens, and of given tokens (scores). Log-probabilities are always finite: an impossible
token has `FLOOR`. A step may score thousands of prompt positions over a large vocabulary. Scores are therefore computed
in parts, and the memory does not grow with the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from bridle.cpu_kernels.library import sampling_kernels
from bridle.cpu_kernels.sampling import MAX_BEST
from bridle.engine.scheduling.step_plan import ScoreRun
from bridle.model.h2d_copies import Download, upload_list
from bridle.model.sampling.fixed_point_probs import UNIT
from bridle.model.sampling.row_totals import RowTotals
from bridle.model.sampling.rows import gather
from bridle.model.sampling.topk import chunk_maxima, num_above, top
from bridle.outputs import Logprob

_T = TypeVar("_T")

#: Log-probability of a forbidden token, or of any token if the logits are not numbers.
FLOOR = -9999.0


def describe(work: torch.Tensor, tokens: Sequence[int], num_top: Sequence[int], vocab: int) -> list[Logprob]:
    """Return the log-probability of `tokens[i]` in row i of logits `work` [R, W], its rank, and the `num_top[i]` best
    tokens (fewer if fewer are possible). The call overwrites `work`."""
    known = [0 <= token < vocab for token in tokens]
    given = [token if is_known else 0 for token, is_known in zip(tokens, known, strict=True)]
    places = survey(RowTotals(work), given, min(max(num_top), vocab)).places
    return [
        Logprob(token, *place_of(values, size)) if is_known else Logprob(token, FLOOR)
        for token, is_known, values, size in zip(tokens, known, places.tolist(), num_top, strict=True)
    ]


#: For a token in a row: its log-probability, the best tokens with their log-probabilities, and its rank.
Place = tuple[float, tuple[tuple[int, float], ...], int]
#: `Place` values as rows of numbers: the log-probability, the rank, the best log-probabilities, and their tokens.
Places = npt.NDArray[np.float64]


class LogprobQuery:
    """Ranks and logits of tokens in their rows. `told`, float64 [R, 4 + 2n], has the token's logit and rank, then the n
    best logits and their positions. The last columns are the row's largest logit and total weight."""

    __slots__ = ("_places", "_told", "largest", "totals")

    def __init__(self, told: torch.Tensor) -> None:
        self.largest, self.totals = told[:, -2:-1], told[:, -1:]  # [R, 1] each
        self._told, self._places = told.cpu().numpy(), np.empty((0, 0))  # now, so that nothing stays on the device

    @property
    def places(self) -> Places:
        """Return the log-probabilities of all rows, which the first read computes. `place_of` converts a row of the
        result."""
        if not self._places.size:
            self._places = _places_of(self._told)
        return self._places


def survey(seen: RowTotals, tokens: Sequence[int], num_best: int) -> LogprobQuery:
    """Return the ranks and logits of `tokens` in their rows, and the `num_best` best tokens of each row. The call
    overwrites the rows in `seen` whose total weight is not known yet."""
    found = sampling_kernels(seen.work)
    if found is not None and num_best <= MAX_BEST:
        return LogprobQuery(found.survey(seen.work, tokens, seen.known_totals(), num_best))
    return LogprobQuery(_survey_by_torch(seen, upload_list(tokens, torch.int64, seen.work.device), num_best))


def _survey_by_torch(seen: RowTotals, tokens: torch.Tensor, num_best: int) -> torch.Tensor:
    """Return the tensor `told` of a `LogprobQuery` for `tokens` [R]. Ids and ranks are exact in float64."""
    work, maxima = seen.work, chunk_maxima(seen.work)
    best, places = top(work, maxima, num_best)  # [R, n]
    chosen, largest = work.gather(1, tokens.unsqueeze(1)), maxima.amax(1, keepdim=True)  # [R, 1]
    ranks = num_above(work, maxima, chosen, best) + 1
    columns = (chosen, ranks, best, places, largest, seen.take_totals(largest))
    return torch.cat([column.double() for column in columns], 1)


def _places_of(told: Places) -> Places:
    found, num_best = told.copy(), told.shape[1] // 2 - 2
    with np.errstate(divide="ignore", invalid="ignore"):  # a row from which no token can be sampled
        norms = found[:, -2:-1] + np.log(found[:, -1:] / UNIT)
        found[:, :1] -= norms
        found[:, 2 : 2 + num_best] -= norms
    return found[:, :-2]


def place_of(values: list[float], size: int) -> Place:
    """Convert one row of log-probabilities to a token's log-probability, its rank, and the `size` best tokens."""
    value, rank, *best = values
    most = len(best) // 2
    return (max(value, FLOOR) if math.isfinite(value) else FLOOR), _best(best[:most], best[most:], size), int(rank)


def _best(values: list[float], ids: list[float], size: int) -> tuple[tuple[int, float], ...]:
    """Return pairs of token and log-probability, the best first, ties in order of id. The input is sorted except for
    ties."""
    if values and values[-1] > -math.inf and len(set(values)) == len(values):
        return tuple(zip(map(int, ids[:size]), values[:size], strict=True))
    return tuple(_sorted_pairs([int(token) for token in ids], values)[:size])


def _sorted_pairs(tokens: list[int], logprobs: list[float]) -> list[tuple[int, float]]:
    """Return pairs of token and log-probability, the best first, ties in order of id. Forbidden tokens are left out."""
    pairs = [(token, value) for token, value in zip(tokens, logprobs, strict=True) if math.isfinite(value)]
    pairs.sort(key=lambda pair: (-pair[1], pair[0]))
    return pairs


def score(logits: torch.Tensor, runs: Sequence[ScoreRun], max_elements: int) -> list[list[Logprob]]:
    """Return the log-probabilities of the tokens of `runs` in `logits` [R, V], one list per run. At most about
    `max_elements` logits are in memory at once."""
    vocab = logits.shape[-1]
    wanted = [(run.logits_start + i, token, run.num_top) for run in runs for i, token in enumerate(run.tokens)]
    answers: list[Logprob] = []
    for part in parts(wanted, vocab, max_elements):
        indices, tokens, num_top = zip(*part, strict=True)
        answers += describe(gather(logits, indices), tokens, num_top, vocab)
    rest = iter(answers)
    return [[next(rest) for _ in run.tokens] for run in runs]


class LateScores:
    """The log-probabilities of the tokens of `runs`, computed asynchronously by a device. The log-probabilities of all
    tokens are downloaded in one copy."""

    def __init__(self, logits: torch.Tensor, runs: Sequence[ScoreRun], max_elements: int) -> None:
        self._runs, self._vocab = runs, logits.shape[-1]
        self._wanted = [(run.logits_start + i, token) for run in runs for i, token in enumerate(run.tokens)]
        num_best = min(max((run.num_top for run in runs), default=0), self._vocab)
        told = []
        for part in parts(self._wanted, self._vocab, max_elements):
            tokens = [token if 0 <= token < self._vocab else 0 for _, token in part]
            seen = RowTotals(gather(logits, [index for index, _ in part]))
            told.append(_survey_by_torch(seen, upload_list(tokens, torch.int64, logits.device), num_best))
        self._download = Download(torch.cat(told)) if told else None

    def take(self) -> list[list[Logprob]]:
        """Wait for the download of the log-probabilities, and return them."""
        rows: list[list[float]] = []
        if self._download is not None:
            rows = _places_of(self._download.wait().numpy()).tolist()
        found = iter(rows)
        return [[self._logprob(token, next(found), run.num_top) for token in run.tokens] for run in self._runs]

    def _logprob(self, token: int, values: list[float], size: int) -> Logprob:
        is_known = 0 <= token < self._vocab
        return Logprob(token, *place_of(values, size)) if is_known else Logprob(token, FLOOR)


def parts(rows: Sequence[_T], vocab: int, max_elements: int) -> Iterator[Sequence[_T]]:
    """Yield slices of `rows` that have about `max_elements` logits each. A row has `vocab` logits."""
    size = max(1, max_elements // vocab)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
