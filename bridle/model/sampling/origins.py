"""What traced tokens were drawn from: the model's own distribution, and the one that mask and bias left of it.

All of it is computed for the traced rows of a step together, from copies: the draw is not touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bridle.engine.plan import SampleRow
from bridle.model.sampling.logprobs import describe
from bridle.model.sampling.rows import gather
from bridle.model.sampling.weights import totals, weights_of
from bridle.outputs import Logprob
from bridle.traced import Draw, Odds


def traced_draws(
    logits: torch.Tensor, rows: Sequence[SampleRow], tokens: Sequence[int], steered: Mapping[int, torch.Tensor]
) -> list[Draw | None]:
    """What the drawn `tokens` of the traced `rows` came from, in `logits` [R, V]; `steered` are the rows [W] that mask
    or bias changed. A row from which nothing was drawn tells nothing."""
    draws: list[Draw | None] = [None] * len(rows)
    traced = [i for i, row in enumerate(rows) if row.num_traced and tokens[i] >= 0]
    if not traced:
        return draws
    work = gather(logits, [rows[i].logits_index for i in traced])  # [T, W]
    found = describe(work, [tokens[i] for i in traced], [rows[i].num_traced for i in traced], logits.shape[-1])
    for i, before in zip(traced, found, strict=True):
        draws[i] = Draw(_odds(before))
    changed = [slot for slot, i in enumerate(traced) if i in steered]
    if changed:
        _add_changes(draws, work[changed], rows, tokens, steered, [traced[slot] for slot in changed], logits.shape[-1])
    return draws


def _add_changes(
    draws: list[Draw | None],
    own: torch.Tensor,
    rows: Sequence[SampleRow],
    tokens: Sequence[int],
    steered: Mapping[int, torch.Tensor],
    changed: Sequence[int],
    vocab: int,
) -> None:
    """Complete the draws of rows `changed`, whose logits are `own` [C, W] before mask and bias."""
    after = torch.stack([steered[i] for i in changed])  # [C, W]
    found = describe(after, [tokens[i] for i in changed], [rows[i].num_traced for i in changed], vocab)
    weights = weights_of(own - own.amax(-1, keepdim=True))
    gone = weights.masked_fill(after > -torch.inf, 0.0)
    told = torch.stack(((after > -torch.inf).sum(-1).double(), totals(gone) / totals(weights)), 1).tolist()
    for i, odds, (num_allowed, taken) in zip(changed, found, told, strict=True):
        draw = draws[i]
        assert draw is not None
        draw.after, draw.num_allowed, draw.taken = _odds(odds), _whole(num_allowed, vocab), taken


def _odds(logprob: Logprob) -> Odds:
    return Odds(logprob.logprob, logprob.rank, logprob.top)


def _whole(num_allowed: float, vocab: int) -> int | None:
    return None if int(num_allowed) >= vocab else int(num_allowed)
