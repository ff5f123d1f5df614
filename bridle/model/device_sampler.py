"""The sampler for GPUs. Kernels sample rows whose parameters are common, and the host waits only when it reads the
sampled tokens. The common parameters are greedy sampling, temperature, top-k up to 128, top-p, min-p, masks, biases,
penalties and log-probabilities. The standard sampler samples all other rows, one after the other, while the host waits.
Rows for the standard sampler use typical-p, top-n-sigma, XTC, dynamic temperature, Mirostat, DRY, a watermark, a larger
top-k, packed biases or traces. Scores of prompts are computed in plain torch, and the host waits for them together with
the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bridle.engine.interfaces import HistoryLookup, PendingSample
from bridle.engine.scheduling.step_plan import SampleBatch, StepResult
from bridle.model.sampler import StandardSampler
from bridle.model.sampling.columns import FixedTable
from bridle.model.sampling.device_draw import DeviceDraws, Drawer
from bridle.model.sampling.logprobs import LateScores, parts
from bridle.traces import Draw

#: Maximum number of logits that are processed at once. Tables and matrices of a sampling take up to four times 4 bytes
#: for each logit.
MAX_ELEMENTS = 1 << 26


class DeviceSampler:
    """Implements `bridle.engine.interfaces.AsyncSampler` on logits of one device."""

    def __init__(self, device: torch.device, max_elements: int = MAX_ELEMENTS) -> None:
        self.drawer = Drawer(device)
        self._standard = StandardSampler()
        self._fixed = FixedTable()
        self._max_elements = max_elements

    def __call__(self, logits: torch.Tensor, batch: SampleBatch, history: HistoryLookup) -> StepResult:
        """Sample all rows and compute all scores of `batch`, like the standard sampler."""
        return self.draw(logits, batch, history).take()

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, batch: SampleBatch, history: HistoryLookup) -> PendingSample:
        """Start sampling `batch` from `logits` [R, V]. If all rows have common parameters, the method returns before
        the device is done. For rows with other parameters, the method waits, because the next step may overwrite the
        logits."""
        vocab = logits.shape[1]
        is_rare = [self._fixed.is_rare(row, vocab) for row in batch.rows]
        usual = [i for i, rare in enumerate(is_rare) if not rare]
        drawn: list[_Usual] = []
        for some in parts(usual, vocab, self._max_elements):
            rows = [batch.rows[i] for i in some]
            fixed = [self._fixed.of(row.sampling) for row in rows]
            drawn.append(_Usual(some, self.drawer.start(logits, rows, fixed, history)))
        scores = LateScores(logits, batch.scores, self._max_elements)
        rest = [i for i, rare in enumerate(is_rare) if rare]
        if not rest:
            return _Drawing(batch, drawn, scores)
        others = replace(batch, rows=[batch.rows[i] for i in rest], scores=[])
        return _Drawing(batch, drawn, scores, rest, self._standard(logits, others, history))


@dataclass(slots=True)
class _Usual:
    """Rows of a batch that the kernels are sampling, with their indices in the batch."""

    where: Sequence[int]
    draws: DeviceDraws


class _Drawing:
    """A batch that is being sampled. Rows for the kernels and scores are in progress; rows of the standard sampler are
    done."""

    def __init__(
        self,
        batch: SampleBatch,
        usual: list[_Usual],
        scores: LateScores,
        rest: Sequence[int] = (),
        others: StepResult | None = None,
    ) -> None:
        self._batch, self._usual, self._scores, self._rest, self._others = batch, usual, scores, rest, others

    @property
    def tokens(self) -> torch.Tensor | None:
        """Return the sampled tokens as one tensor [rows] on the device, for work that is launched later; None if there
        is no such tensor."""
        is_one = len(self._usual) == 1 and self._others is None
        return self._usual[0].draws.tokens if is_one else None

    def take(self) -> StepResult:
        """Wait for the tokens. The returned results have the order of `batch.rows`."""
        num_rows = len(self._batch.rows)
        result = StepResult(self._batch.step, [0] * num_rows, [None] * num_rows)
        for each in self._usual:
            tokens, logprobs = each.draws.take()
            for i, token, logprob in zip(each.where, tokens, logprobs, strict=True):
                result.tokens[i], result.logprobs[i] = token, logprob
        if self._others is not None:
            _add_others(result, self._rest, self._others)
        result.scores = self._scores.take()
        return result


def _add_others(result: StepResult, where: Sequence[int], others: StepResult) -> None:
    """Copy the standard sampler's results `others` into `result`, at the row numbers `where`."""
    num_rows = len(result.tokens)
    if others.mus:
        result.mus = [0.0] * num_rows
    draws: list[Draw | None] = [None] * num_rows if len(others.draws) else []
    for slot, i in enumerate(where):
        result.tokens[i], result.logprobs[i] = others.tokens[slot], others.logprobs[slot]
        if others.mus:
            result.mus[i] = others.mus[slot]
        if draws:
            draws[i] = others.draws[slot]
    result.draws = draws
