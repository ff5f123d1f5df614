"""The sampling row of a token, with the restrictions of the controller and of the request."""

from __future__ import annotations

import math
from collections.abc import Sequence as Vector

from bridle.engine.control.decision import Branch, both_masks
from bridle.engine.scheduling.step_plan import SampleRow
from bridle.engine.sequence import Sequence
from bridle.sampling import SamplingParams
from bridle.traces import NUM_CANDIDATES

Tokens = tuple[tuple[int, ...], ...]


def draws_plainly(seq: Sequence) -> bool:
    """Return whether the sampling parameters alone decide how tokens are sampled. Bans, and decisions of the
    controller, are not considered."""
    sampling = seq.sampling
    has_rules = sampling.min_tokens or sampling.bad_words_ids or sampling.lookahead or sampling.has_mirostat
    is_watched = seq.is_traced or seq.output.aligned is not None
    is_free = seq.allowed is None and seq.request.healing is None
    return is_free and not (has_rules or is_watched)


def draw_row(
    owner: Sequence,
    branch: Branch,
    mirror: int,
    index: int,
    drafts: Vector[int] = (),
    place: int = 0,
    num_draws: int = 0,
) -> SampleRow:
    """Return the row that samples a token for `owner` from logits row `index` of the sequence `mirror`. `place` draft
    tokens come before the sampled token; `num_draws` of them are sampled."""
    own, bias = owner.sampling, branch.bias
    sampling = own if branch.sampling is None else _with_logprobs_of(own, branch.sampling)
    if branch.top_logprobs:
        sampling = _with_candidates(sampling, branch.top_logprobs)
    if own.min_tokens and owner.num_generated + place < own.min_tokens:
        bias = (*bias, *((token, -float("inf")) for token in sorted(owner.stop_ids)))
    if own.bad_words_ids:
        tokens = owner.tokens + list(drafts[:place])
        bias = (*bias, *_completing(own.bad_words_ids, tokens, owner.num_generated + place))
    if owner.output.aligned is not None:
        bias = (*bias, *owner.output.aligned.biases())
    if banned := owner.output.bans.get(len(owner.tokens) + place):
        bias = (*bias, *((token, -math.inf) for token in sorted(banned)))
    mask = branch.mask if owner.allowed is None else both_masks(branch.mask, owner.allowed)
    if (healing := owner.request.healing) is not None:
        mask = healing.restrict(mask, owner.tokens, owner.num_prompt)
    mu = owner.draws.mus[-1][1] if owner.draws.mus else None
    number, num_ahead = owner.draws.num_draws + num_draws, len(drafts) - place
    is_metered = owner.output.meter is not None and (mask is not None or owner.output.aligned is not None)
    num_traced = int(is_metered) if owner.trace is None else NUM_CANDIDATES
    return SampleRow(mirror, index, sampling, owner.key, number, mask, bias, mu, num_ahead, num_traced)


def _completing(words: Tokens, tokens: list[int], num_generated: int) -> list[tuple[int, float]]:
    """Return biases that ban the last token of each phrase in `words`, if the output ends with its other tokens."""
    last = len(tokens)
    return [
        (word[-1], -math.inf)
        for word in words
        if len(word) - 1 <= num_generated and tuple(tokens[last - len(word) + 1 :]) == word[:-1]
    ]


def _with_logprobs_of(own: SamplingParams, override: SamplingParams) -> SamplingParams:
    """Return the controller's sampling parameters, with the log-probabilities that the client requested and the
    operator's watermark. The controller's parameters change how a token is sampled. The parameters of a controller
    change neither the data that the client receives nor the operator's policies."""
    if own.watermark is not None and own.watermark.key:
        override = override.with_(watermark=own.watermark)
    if (override.logprobs, override.logprobs_mode) == (own.logprobs, own.logprobs_mode):
        return override
    return override.with_(logprobs=own.logprobs, logprobs_mode=own.logprobs_mode)


def _with_candidates(sampling: SamplingParams, count: int) -> SamplingParams:
    """Return the sampling parameters, changed so that the controller gets the candidates that it asked for. Candidates
    are computed after mask and bias, unless the client set something else."""
    if sampling.logprobs is None:
        return sampling.with_(logprobs=count, logprobs_mode="processed")
    return sampling.with_(logprobs=max(count, sampling.logprobs))
