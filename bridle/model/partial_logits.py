"""Computes the logits of a large step on a CPU in parts, when they are sampled, to bound their memory. All logits of
256 sequences over a vocabulary of 262,144 tokens would take 256 MiB. The logits of every 256 tokens of a scored prompt
would take the same memory again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bridle.engine.interfaces import HistoryLookup, Sampler
from bridle.engine.sampling.padded_vocab import PaddedVocab
from bridle.engine.scheduling.step_plan import SampleBatch, SampleRow, ScoreRun, StepResult
from bridle.model.sampling.logprobs import parts

#: Maximum number of logits that are in memory at once.
MAX_LOGITS = 1 << 23
#: Forbids the ids of logits [R, V] that a batch excludes.
Strike = Callable[[Tensor, PaddedVocab], None]


@dataclass(frozen=True, slots=True)
class PartialLogits:
    """Logits [R, V] that are not computed yet. `head` computes the logits from rows of `hidden` [R, H]; V is
    `vocab_size`."""

    hidden: Tensor
    head: Callable[[Tensor], Tensor]
    vocab_size: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.hidden.shape[0], self.vocab_size

    def sample(self, batch: SampleBatch, sampler: Sampler, history: HistoryLookup, strike: Strike) -> StepResult:
        """Return the result that `sampler` would return for `batch` if it got all logits at once."""

        def answer(numbers: Sequence[int], part: SampleBatch) -> StepResult:
            logits = self.head(self.hidden.index_select(0, torch.tensor(numbers)))
            strike(logits, batch.unnamed)
            return sampler(logits, part, history)

        sampled = [
            (len(rows), answer(*_of_rows(batch, rows))) for rows in parts(batch.rows, self.vocab_size, MAX_LOGITS)
        ]
        wanted = [(run, i) for run in batch.scores for i in range(len(run.tokens))]
        scored = (answer(*_of_scores(batch, some)).scores for some in parts(wanted, self.vocab_size, MAX_LOGITS))
        each = iter([score for scores in scored for (score,) in scores])
        result = _joined(batch.step, sampled)
        result.scores = [[next(each) for _ in run.tokens] for run in batch.scores]
        return result


def _of_rows(batch: SampleBatch, rows: Sequence[SampleRow]) -> tuple[list[int], SampleBatch]:
    """Return the indices of the logits rows that `rows` read, each once, and a batch that reads only these logits
    rows."""
    numbers = sorted({row.logits_index for row in rows})
    places = {number: place for place, number in enumerate(numbers)}
    moved = [replace(row, logits_index=places[row.logits_index]) for row in rows]
    return numbers, SampleBatch(batch.step, moved, [], batch.unnamed)


def _of_scores(batch: SampleBatch, wanted: Sequence[tuple[ScoreRun, int]]) -> tuple[list[int], SampleBatch]:
    """Return the same as `_of_rows`, but for tokens of runs whose log-probabilities are requested (scores). `wanted`
    has pairs of a run and the index of a token in this run."""
    runs = [ScoreRun(run.seq_id, place, (run.tokens[i],), run.num_top) for place, (run, i) in enumerate(wanted)]
    return [run.logits_start + i for run, i in wanted], SampleBatch(batch.step, [], runs, batch.unnamed)


def _joined(step: int, sampled: Sequence[tuple[int, StepResult]]) -> StepResult:
    """Concatenate the results of a batch's parts. `sampled` has the number of rows and the result of each part."""
    joined = StepResult(step)
    for _, part in sampled:
        joined.tokens += part.tokens
        joined.logprobs += part.logprobs
    if any(part.mus for _, part in sampled):
        joined.mus = [mu for size, part in sampled for mu in part.mus or [0.0] * size]
    if any(part.draws for _, part in sampled):
        joined.draws = [draw for size, part in sampled for draw in part.draws or [None] * size]
    return joined
