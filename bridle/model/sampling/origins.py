"""What traced tokens were drawn from: the model's own distribution, and the one that mask and bias left of it.

All of it is computed for the traced rows of a step together, from what the draw has found already where it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bridle.engine.plan import SampleRow
from bridle.model.sampling.extremes import count_above
from bridle.model.sampling.logprobs import Place, survey
from bridle.model.sampling.rows import gather
from bridle.model.sampling.seen import Seen
from bridle.model.sampling.weights import totals, weights_of
from bridle.traced import Draw, Odds


def traced_draws(
    logits: torch.Tensor,
    rows: Sequence[SampleRow],
    tokens: Sequence[int],
    steered: Mapping[int, torch.Tensor],
    seen: Seen | None,
) -> list[Draw | None]:
    """What the drawn `tokens` of the traced `rows` came from, in `logits` [R, V]; `steered` are the rows [W] that mask
    or bias changed, `seen` is all of them, if the draw has left them so; they are used up. A row from which nothing was
    drawn tells nothing."""
    draws: list[Draw | None] = [None] * len(rows)
    traced = [i for i, row in enumerate(rows) if row.num_traced and tokens[i] >= 0]
    vocab = logits.shape[-1]
    plain = [i for i in traced if i not in steered]
    if plain:
        own = Seen.of(_own(logits, rows, plain)) if seen is None else seen.rows(plain)
        found, _ = survey(own, *_asked(rows, tokens, plain), vocab)
        for i, place in zip(plain, found, strict=True):
            draws[i] = Draw(_odds(place))
    changed = [i for i in traced if i in steered]
    if changed:
        own = Seen.of(_own(logits, rows, changed))
        after = Seen.of(torch.stack([steered[i] for i in changed])) if seen is None else seen.rows(changed)
        for i, draw in zip(changed, _changes(own, after, rows, tokens, changed, vocab), strict=True):
            draws[i] = draw
    return draws


def _own(logits: torch.Tensor, rows: Sequence[SampleRow], indices: Sequence[int]) -> torch.Tensor:
    """What the model said: copies [len(indices), W]."""
    return gather(logits, [rows[i].logits_index for i in indices])


def _asked(rows: Sequence[SampleRow], tokens: Sequence[int], indices: Sequence[int]) -> tuple[list[int], list[int]]:
    """The tokens of these rows, and with how many of the best ones they are told."""
    return [tokens[i] for i in indices], [rows[i].num_traced for i in indices]


def _changes(
    own: Seen, after: Seen, rows: Sequence[SampleRow], tokens: Sequence[int], changed: Sequence[int], vocab: int
) -> list[Draw]:
    """The draws of rows `changed`: the model's `own` logits [C, W], and what mask and bias left `after`."""
    is_biased = any(rows[i].bias or rows[i].sampling.logit_bias for i in changed)
    num_allowed = count_above(after.work, torch.full_like(after.largest, -torch.inf))  # [C, 1]
    gone = _gone(own, after) if is_biased else None
    best, least = own.largest, after.largest
    before, total = survey(own, *_asked(rows, tokens, changed), vocab)
    left, rest = survey(after, *_asked(rows, tokens, changed), vocab)
    if gone is None:  # what a mask has left has kept its weights, which are counted from another largest one
        gone = total - rest * (least - best).double().exp()
    taken = (gone / total).clamp(0.0, 1.0)  # [C, 1]
    told = torch.cat((num_allowed.double(), taken), 1).tolist()
    return [
        Draw(_odds(was), _odds(now), None if num >= vocab else int(num), share)
        for was, now, (num, share) in zip(before, left, told, strict=True)
    ]


def _gone(own: Seen, after: Seen) -> torch.Tensor:
    """The weights of what is not allowed any more: float64 [C, 1]."""
    weights = weights_of(own.work - own.largest)
    return totals(weights.masked_fill_(after.work > -torch.inf, 0.0)).unsqueeze(1)


def _odds(place: Place) -> Odds:
    logprob, top, rank = place
    return Odds(logprob, rank, top)
