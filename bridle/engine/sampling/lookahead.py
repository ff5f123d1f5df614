"""Lookahead: a token is chosen together with the tokens that a mask forces after it.

A mask may allow a likely token even if the grammar then forces text that the model finds improbable. For a request with
`lookahead`, a second row of the step gives the best allowed tokens. If tokens are forced after a candidate,
`ChoiceScorer` scores the candidates as options of a choice, in one packed step. The sampled candidate enters the output
like any sampled token. The controller of the output then forces the tokens after the candidate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Vector
from dataclasses import replace

from bridle.engine.control.decision import Branch
from bridle.engine.sampling.token_trie import Tokens
from bridle.engine.scheduling.step_plan import SampleRow
from bridle.engine.sequence import Sequence
from bridle.outputs import Logprob
from bridle.sampling import SamplingParams

#: Maximum number of candidates that are compared by the tokens forced after them.
NUM_CANDIDATES = 8
_LOOK = SamplingParams(temperature=0.0, logprobs=NUM_CANDIDATES, logprobs_mode="processed")


def looks_ahead(branches: Vector[Branch]) -> bool:
    """Return whether a sequence that continues by `branches` considers forced tokens when it chooses its next token."""
    first = branches[0]
    is_drawn = first.sample and first.mask is not None and not first.splices
    return is_drawn and all(branch is first for branch in branches)


def candidate_row(row: SampleRow) -> SampleRow:
    """Return a row that gives the best tokens under the mask and bias of `row`, from the same logits."""
    bias = (*row.sampling.logit_bias.items(), *row.bias)
    return replace(row, sampling=_LOOK, bias=bias, mu=None, num_traced=0)


def options_with_forced(seq: Sequence, candidates: Logprob | None) -> dict[Tokens, float]:
    """Return the candidates, each with the tokens that are forced after it, and with the log-probability of the
    candidate alone. If no candidate has forced tokens after it, the result is empty."""
    pool, room = seq.control.pool, seq.max_len - len(seq.tokens) - 1
    if candidates is None or pool is None or room <= 0 or not seq.kv.block_table:
        return {}
    found = [(token, logprob) for token, logprob in candidates.top if logprob > -math.inf]
    forced = pool.forced_after(seq.id, [token for token, _ in found], min(seq.sampling.lookahead, room))
    if len(found) < 2 or not any(forced):
        return {}
    return {(token, *after): logprob for (token, logprob), after in zip(found, forced, strict=True)}
