"""The standard sampler, which chooses tokens from logits in plain torch. Each row passes these steps, in this order:
gather (a copy), logit bias, mask, penalties, DRY, watermark, top-n-sigma, temperature, top-k, top-p, min-p, typical-p,
XTC, sampling. Mirostat replaces the steps from top-k to XTC. Log-probabilities are computed from the original logits,
or from the logits after bias and mask. The arrays of a step are rebuilt from its rows, so a request may change its
parameters from one token to the next. Operations that no row of the step needs are skipped. The sampler does not depend
on KV, blocks or text.

A row's token depends only on the row's logits, parameters, history, key and number of tokens sampled so far. The
sampled token is the same in any batch and with any padding of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from bridle.cpu_kernels.library import sampling_kernels
from bridle.cpu_kernels.sampling import MAX_BEST
from bridle.cpu_kernels.threads import torch_alone
from bridle.engine.interfaces import HistoryLookup
from bridle.engine.scheduling.step_plan import SampleBatch, SampleRow, StepResult
from bridle.model.h2d_copies import upload, upload_list
from bridle.model.sampling.draw import draw
from bridle.model.sampling.draw_provenance import TracedDraws, traced_draws
from bridle.model.sampling.dry import Dry
from bridle.model.sampling.filters import apply_filters, cuts_of, on_rows
from bridle.model.sampling.logprobs import describe, parts, score
from bridle.model.sampling.mirostat import cut_surprising, next_mus
from bridle.model.sampling.param_flags import Kinds, SamplingFlags
from bridle.model.sampling.penalties import Histories
from bridle.model.sampling.row_totals import RowTotals
from bridle.model.sampling.rows import BiasTable, apply_masks, gather, pick
from bridle.model.sampling.topk import largest, largest_allowed
from bridle.model.sampling.truncation import cut_sigma, dynamic_temperatures, exclude_top
from bridle.model.sampling.uniform import uniforms
from bridle.model.sampling.watermark import apply_watermarks
from bridle.outputs import Logprob
from bridle.sampling import SamplingParams

#: The token that stands for a row from which no token can be sampled.
NOTHING = -1

#: Maximum number of logits that are processed at once. On a CPU a core can cache this number through the dozen passes
#: over them. This takes a quarter to a third less time than a limit eight times as high (64 rows; 32,000 and 152,000
#: tokens).
_MAX_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}
_SMALLEST_TEMPERATURE = 1e-30  # float32 cannot divide by smaller numbers


class StandardSampler:
    """Implements `bridle.engine.interfaces.Sampler` on torch logits of any floating type and device."""

    def __init__(self, max_elements: int | None = None) -> None:
        self._max_elements = max_elements
        self._biases = BiasTable()
        self._histories = Histories()
        self._dry = Dry()
        self._kinds = Kinds()

    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor, batch: SampleBatch, history: HistoryLookup) -> StepResult:
        """Sample all rows, and compute all scores, of `batch` from `logits` [R, V]. If mask and bias leave no token in
        a row, or its logits are NaN, the row gets the token -1 and no log-probability."""
        with torch_alone() if sampling_kernels(logits) is not None else nullcontext():
            return self._answer(logits, batch, history)

    def _answer(self, logits: torch.Tensor, batch: SampleBatch, history: HistoryLookup) -> StepResult:
        limit = self._max_elements or _MAX_ELEMENTS.get(logits.device.type, _MAX_ELEMENTS["cuda"])
        result = StepResult(batch.step)
        mus: dict[int, float] = {}
        is_traced = any(row.num_traced for row in batch.rows)
        draws = TracedDraws()
        for rows in parts(batch.rows, logits.shape[-1], limit):
            drawn = self._tokens(logits, rows, history)
            mus |= {len(result.tokens) + i: mu for i, mu in drawn.mus.items()}
            result.tokens += drawn.tokens
            result.logprobs += _logprobs(logits, rows, drawn.tokens, drawn.processed)
            if is_traced:
                draws.extend(traced_draws(logits, rows, drawn.tokens, drawn.processed, drawn.seen))
        result.scores = score(logits, batch.scores, limit)
        result.draws = draws
        result.mus = [mus.get(i, 0.0) for i in range(len(batch.rows))] if mus else []
        return result

    def _tokens(self, logits: torch.Tensor, rows: Sequence[SampleRow], history: HistoryLookup) -> _Drawn:
        indices = [row.logits_index for row in rows]
        is_traced = any(row.num_traced for row in rows)
        kinds = [self._kinds.of(row.sampling) for row in rows]
        is_kept = not any(kind.looks_back for kind in kinds)  # the work array keeps its values from after bias and mask
        drawn = [i for i, kind in enumerate(kinds) if not kind.is_greedy]
        if is_kept and not (drawn or is_traced) and (read := _read(logits, indices, rows)) is not None:
            best, token = read
            return _Drawn(torch.where(best.isfinite(), token, NOTHING).tolist())
        work = gather(logits, indices)  # [len(rows), W]
        self._biases.apply(work, rows, logits.shape[-1])
        apply_masks(work, rows)
        told = [i for i, row in enumerate(rows) if _is_changed(row) and (row.num_traced > 0 or _wants_processed(row))]
        made = _Drawn([], {i: work[i] if is_kept else work[i].clone() for i in told})
        if not is_kept:
            self._histories.apply(work, rows, history, logits.shape[-1])
            self._dry.apply(work, rows, history, self._histories, logits.shape[-1])
            apply_watermarks(work, rows, history, logits.shape[-1])
        made.seen = RowTotals(work) if is_traced and is_kept else None
        best, token = _largest(work, has_greedy=len(drawn) < len(rows))
        if drawn:
            index = upload_list(drawn, torch.int64, work.device)
            chosen, their_kinds = [rows[i] for i in drawn], [kinds[i] for i in drawn]
            token[index], moved, totals = _draw(work, drawn, index, best[index], chosen, their_kinds)
            made.mus = {drawn[slot]: mu for slot, mu in moved.items()}
            if made.seen is not None:
                made.seen.count(index, totals, [kind.is_as_is for kind in kinds])
        made.tokens = torch.where(best.isfinite(), token, NOTHING).tolist()
        return made


def _read(
    logits: torch.Tensor, indices: Sequence[int], rows: Sequence[SampleRow]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the largest logit that each row's mask allows, and its column, both [len(rows)]. Return None if the rows
    must be copied before sampling."""
    if not any(_is_changed(row) for row in rows):
        return largest(pick(logits, indices))
    if any(_is_biased(row) or (row.mask is not None and _wants_processed(row)) for row in rows):
        return None
    return largest_allowed(logits, indices, [row.mask for row in rows])


def _largest(work: torch.Tensor, *, has_greedy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest value of each row of `work` [R, W] and its column, both [R]. Only greedy rows need the column.
    To find the column, torch takes ten times as long as to find the value."""
    if has_greedy or sampling_kernels(work) is not None:
        return largest(work)
    best = work.amax(-1)
    return best, torch.empty_like(best, dtype=torch.int64)  # each row draws its own


_Processed = dict[int, torch.Tensor]


@dataclass(slots=True)
class _Drawn:
    """Result of sampling. `processed` has the rows [W] that mask or bias changed, for rows that report them. `mus` are
    the states of Mirostat after sampling. `seen` has all rows after mask and bias, for traces. `seen` is None if later
    sampling steps changed the rows."""

    tokens: list[int]
    processed: _Processed = field(default_factory=dict)
    mus: dict[int, float] = field(default_factory=dict)
    seen: RowTotals | None = None


def _is_changed(row: SampleRow) -> bool:
    """Return whether the row has a bias or a mask."""
    return row.mask is not None or _is_biased(row)


def _is_biased(row: SampleRow) -> bool:
    return bool(row.bias) or bool(row.sampling.logit_bias)


def _wants_processed(row: SampleRow) -> bool:
    sampling = row.sampling
    return sampling.logprobs is not None and sampling.logprobs_mode == "processed"


def _draw(
    work: torch.Tensor,
    where: Sequence[int],
    index: torch.Tensor,
    best: torch.Tensor,
    rows: Sequence[SampleRow],
    kinds: Sequence[SamplingFlags],
) -> tuple[torch.Tensor, dict[int, float], torch.Tensor]:
    """Sample from the rows `where` of logits `work` [R, W]; `index` has the same rows as a tensor. Return tokens [n],
    the next states of Mirostat by row, and the total weights [n, 1] of the distributions. `best` [n] are the rows'
    largest logits."""
    found, params = sampling_kernels(work), [row.sampling for row in rows]
    is_cut = any(kind.is_cut for kind in kinds)
    is_plain = not any(kind.is_bent for kind in kinds)
    if found is None or not is_plain or (is_cut and any(MAX_BEST < p.top_k < work.shape[1] for p in params)):
        return _draw_cut(work[index], best, rows)
    temperatures = _temperatures(work, params).clamp_(min=_SMALLEST_TEMPERATURE)
    uniform = torch.from_numpy(uniforms([row.key for row in rows], [row.draw for row in rows]))
    cuts = cuts_of(params) if is_cut else None
    token, totals = found.draw(work, where, best, temperatures, uniform, cuts)
    return token, {}, totals


def _draw_cut(
    work: torch.Tensor, best: torch.Tensor, rows: Sequence[SampleRow]
) -> tuple[torch.Tensor, dict[int, float], torch.Tensor]:
    """Apply all filters that remove tokens to rows `work` [n, W], then sample. Returns the same values as `_draw`.
    Overwrites `work`."""
    params = [row.sampling for row in rows]
    work -= best.unsqueeze(1)
    cut = [i for i, p in enumerate(params) if p.top_n_sigma > 0.0]
    on_rows(work, cut, lambda x, some: cut_sigma(x, [params[i] for i in some]))
    if any(p.temperature != 1.0 or p.dynatemp_range for p in params):
        work /= _temperatures(work, params).clamp_(min=_SMALLEST_TEMPERATURE)
    surprised = [i for i, p in enumerate(params) if p.has_mirostat]
    apply_filters(work, [_WITHOUT if p.has_mirostat else p for p in params] if surprised else params)
    _exclude_top(work, rows)
    on_rows(work, surprised, lambda x, some: cut_surprising(x, [rows[i] for i in some]))
    uniform = uniforms([row.key for row in rows], [row.draw for row in rows])
    token, totals = draw(work, upload(uniform, work.device))
    if not surprised:
        return token, {}, totals
    index = upload_list(surprised, torch.int64, work.device)
    moved = next_mus(work[index], token[index], [rows[i] for i in surprised])
    return token, dict(zip(surprised, moved, strict=True)), totals


#: The filters of a row that has Mirostat: none.
_WITHOUT = SamplingParams()
#: Makes of a row's key the one of the number that decides about XTC, so that the draw itself stays as it is.
_XTC_KEY = 0x5854_4321_C0FF_EE11


def _temperatures(work: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the temperature of each row of `work` [R, W]: float32 [R, 1]."""
    given = upload_list([[p.temperature] for p in params], torch.float32, work.device)
    moving = [i for i, p in enumerate(params) if p.dynatemp_range]
    if moving:
        index = upload_list(moving, torch.int64, work.device)
        given[index] = dynamic_temperatures(work[index], [params[i] for i in moving])
    return given


def _exclude_top(work: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    asked = [i for i, row in enumerate(rows) if row.sampling.xtc_probability and not row.sampling.has_mirostat]
    if not asked:
        return
    chances = uniforms([rows[i].key ^ _XTC_KEY for i in asked], [rows[i].draw for i in asked])
    struck = [i for i, chance in zip(asked, chances, strict=True) if chance < rows[i].sampling.xtc_probability]
    on_rows(work, struck, lambda x, some: exclude_top(x, [rows[i].sampling for i in some]))


def _logprobs(
    logits: torch.Tensor, rows: Sequence[SampleRow], tokens: Sequence[int], processed: _Processed
) -> list[Logprob | None]:
    """Return the log-probabilities of the sampled `tokens`, for the rows that request them."""
    answers: list[Logprob | None] = [None] * len(rows)
    asked = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None and tokens[i] != NOTHING]
    if not asked:
        return answers
    work = gather(logits, [rows[i].logits_index for i in asked])
    for slot, i in enumerate(asked):
        if i in processed and _wants_processed(rows[i]):
            work[slot] = processed[i]
    num_top = [rows[i].sampling.logprobs or 0 for i in asked]
    found = describe(work, [tokens[i] for i in asked], num_top, logits.shape[-1])
    for i, logprob in zip(asked, found, strict=True):
        answers[i] = logprob
    return answers
