"""Samples tokens from logits, one row at a time, in plain numpy. The code is short enough to be checked by reading.

The order is raw log-probabilities, bias, mask, processed log-probabilities, penalties, DRY, top-n-sigma, temperature,
top-k, top-p, min-p, typical-p, XTC, sampling. Mirostat replaces the steps from top-k to XTC. Of tokens with equal
values, the lower token id comes first everywhere. A row is sampled alone, so other rows have no effect on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bridle.engine.scheduling.step_plan import SampleRow
from bridle.outputs import Logprob
from bridle.sampling import SamplingParams
from bridle.testing.logits import Logits, uniform
from bridle.traces import Draw, Odds


def sample_row(logits: Logits, row: SampleRow, history: Sequence[int], num_prompt: int) -> tuple[int, Logprob | None]:
    """Return the token sampled from `logits` [V] for `row` (-1: no token is left), and its log-probability if
    requested."""
    sampling = row.sampling
    steered = _steer(logits, row)
    if not np.any(np.isfinite(steered)):
        return -1, None
    scores = _dry(_penalize(steered, sampling, history, num_prompt), sampling, history)
    if sampling.is_greedy:
        token = int(np.argmax(scores))
    else:
        token = _draw(distribution(scores, row), uniform(row.key, row.draw))
    if sampling.logprobs is None:
        return token, None
    reported = logits if sampling.logprobs_mode == "raw" else steered
    return token, logprob_of(reported, token, sampling.logprobs)


def next_mu(logits: Logits, row: SampleRow, history: Sequence[int], num_prompt: int, token: int) -> float:
    """Return the state of Mirostat after `token` was sampled from `logits` for `row`."""
    sampling = row.sampling
    scores = _dry(_penalize(_steer(logits, row), sampling, history, num_prompt), sampling, history)
    probs = distribution(scores, row)
    surprise = -math.log2(probs[token] / probs.sum())
    return _mu(row) - sampling.mirostat_eta * (surprise - sampling.mirostat_tau)


def logprob_of(logits: Logits, token: int, num_top: int) -> Logprob:
    """Return the log-probability of `token` under the softmax of `logits` [V], with the `num_top` most probable
    tokens."""
    finite = logits[np.isfinite(logits)]
    peak = float(finite.max())
    logprobs = logits - (peak + float(np.log(np.exp(finite - peak).sum())))  # [V]
    best = [int(i) for i in _descending(logits)[:num_top] if np.isfinite(logits[i])]
    top = tuple((i, float(logprobs[i])) for i in best)
    rank = 1 + int(np.count_nonzero(logits > logits[token]))
    return Logprob(token, float(logprobs[token]), top, rank)


def draw_of(logits: Logits, row: SampleRow, token: int) -> Draw:
    """Return the distribution from which `token` was sampled, for a traced row."""
    before, steered = _odds(logits, token, row.num_traced), _steer(logits, row)
    if row.mask is None and not row.bias and not row.sampling.logit_bias:
        return Draw(before)
    probs = np.exp(logits - logits.max())
    is_allowed = np.isfinite(steered)
    num_allowed = int(is_allowed.sum())
    taken = float(probs[~is_allowed].sum() / probs.sum())
    after = _odds(steered, token, row.num_traced)
    return Draw(before, after, None if num_allowed == len(logits) else num_allowed, taken)


def _odds(logits: Logits, token: int, num_top: int) -> Odds:
    found = logprob_of(logits, token, num_top)
    return Odds(found.logprob, found.rank, found.top)


def _descending(values: NDArray[np.float64]) -> NDArray[np.int64]:
    order: NDArray[np.int64] = np.argsort(-values, kind="stable")
    return order


def _steer(logits: Logits, row: SampleRow) -> Logits:
    steered = logits.copy()
    for token, addend in (*row.sampling.logit_bias.items(), *row.bias):
        steered[token] += addend
    if row.mask is not None:
        bits = np.unpackbits(np.frombuffer(row.mask, dtype=np.uint8), bitorder="little")
        steered[bits[: len(steered)] == 0] = -np.inf
    return steered


def _penalize(logits: Logits, sampling: SamplingParams, history: Sequence[int], num_prompt: int) -> Logits:
    if not sampling.has_penalties:
        return logits
    out = logits.copy()
    for token in set(history):
        penalty = sampling.repetition_penalty
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    output = list(history[num_prompt:])
    for token in set(output):
        out[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
    return out


def _dry(logits: Logits, sampling: SamplingParams, history: Sequence[int]) -> Logits:
    """Return the logits after DRY. The logit of a token is reduced if the token continues a repetition. A longer
    repetition reduces the logit more."""
    if not sampling.has_dry:
        return logits
    breakers = set(sampling.dry_breaker_ids)
    tokens = list(history) if sampling.dry_penalty_last_n < 0 else list(history)[-sampling.dry_penalty_last_n :]
    longest: dict[int, int] = {}
    for place, following in enumerate(tokens[1:]):
        length = 0
        while length < 50 and place - length >= 0 and tokens[place - length] == tokens[-1 - length]:
            if tokens[place - length] in breakers:
                break
            length += 1
        if length and following not in breakers:
            longest[following] = max(longest.get(following, 0), length)
    out = logits.copy()
    for token, length in longest.items():
        if length >= sampling.dry_allowed_length:
            excess = length - sampling.dry_allowed_length
            out[token] -= min(sampling.dry_multiplier * sampling.dry_base**excess, 1e30)
    return out


def distribution(scores: Logits, row: SampleRow) -> NDArray[np.float64]:
    """Return the probabilities [V] with which tokens are sampled from `scores`, not normalized."""
    sampling = row.sampling
    scores = _within_sigma(scores, sampling)
    scores = scores / _temperature(scores, sampling)
    if sampling.has_mirostat:
        return _unsurprising(np.exp(scores - scores.max()), _mu(row))
    probs = _keep(scores, sampling)
    if uniform(row.key ^ 0x5854_4321_C0FF_EE11, row.draw) < sampling.xtc_probability:
        probs = _exclude_top(probs, scores, sampling.xtc_threshold)
    return probs


def _within_sigma(scores: Logits, sampling: SamplingParams) -> Logits:
    if sampling.top_n_sigma <= 0.0:
        return scores
    sigma = float(np.std(scores[np.isfinite(scores)]))
    out: Logits = np.where(scores >= scores.max() - sampling.top_n_sigma * sigma, scores, -np.inf)
    return out


def _temperature(scores: Logits, sampling: SamplingParams) -> float:
    if not sampling.dynatemp_range:
        return sampling.temperature
    probs = np.exp(scores[np.isfinite(scores)] - scores.max())
    probs = probs[probs > 0] / probs.sum()
    entropy = -float((probs * np.log(probs)).sum())
    share = entropy / math.log(max(int(np.isfinite(scores).sum()), 2))
    low = max(sampling.temperature - sampling.dynatemp_range, 0.0)
    high = sampling.temperature + sampling.dynatemp_range
    power: float = min(max(share, 0.0), 1.0) ** sampling.dynatemp_exponent
    return max(low + (high - low) * power, 1e-30)


def _exclude_top(probs: NDArray[np.float64], scores: Logits, threshold: float) -> NDArray[np.float64]:
    top = [int(i) for i in _descending(scores) if probs[i] > 0 and probs[i] >= threshold * probs.sum()]
    kept = probs.copy()
    kept[top[:-1]] = 0.0
    return kept


def _mu(row: SampleRow) -> float:
    return 2.0 * row.sampling.mirostat_tau if row.mu is None else row.mu


def _unsurprising(probs: NDArray[np.float64], mu: float) -> NDArray[np.float64]:
    surprise = -np.log2(probs / probs.sum(), where=probs > 0, out=np.full_like(probs, -np.inf))
    kept = np.where((probs > 0) & (surprise <= mu), probs, 0.0)
    best = int(np.argmax(probs))
    kept[best] = probs[best]
    return kept


def _keep(scores: Logits, sampling: SamplingParams) -> NDArray[np.float64]:
    """Return the probabilities [V] after truncation, not normalized. Tokens that truncation leaves out have probability
    0."""
    probs: NDArray[np.float64] = np.exp(scores - scores[np.isfinite(scores)].max())
    if sampling.top_k > 0:
        probs[_descending(scores)[sampling.top_k :]] = 0.0
    if sampling.top_p < 1.0:
        order = _descending(probs)
        before = np.cumsum(probs[order]) / probs.sum() - probs[order] / probs.sum()
        outside = before >= sampling.top_p
        outside[0] = False
        probs[order[outside]] = 0.0
    if sampling.min_p > 0.0:
        probs[probs < sampling.min_p * probs.max()] = 0.0
    if sampling.typical_p < 1.0:
        probs = _typical(probs / probs.sum(), sampling.typical_p)
    return probs


def _typical(probs: NDArray[np.float64], limit: float) -> NDArray[np.float64]:
    logs = np.log(probs, where=probs > 0, out=np.zeros_like(probs))
    entropy = -float((probs * logs).sum())
    surprise = np.where(probs > 0, np.abs(-logs - entropy), np.inf)
    order = np.argsort(surprise, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    outside = before >= limit
    outside[0] = False
    kept = probs.copy()
    kept[order[outside]] = 0.0
    return kept


def _draw(probs: NDArray[np.float64], number: float) -> int:
    heights = np.cumsum(probs)
    token = int(np.searchsorted(heights, number * heights[-1], side="right"))
    return min(token, int(np.flatnonzero(probs)[-1]))
