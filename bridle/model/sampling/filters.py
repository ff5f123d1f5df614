"""Top-k, top-p, min-p and typical-p: filters of the tokens that may be sampled.

Top-k and top-p keep a prefix of the tokens in descending order of logits, with ties in ascending order of ids. So only
the largest logits of a row must be sorted: at first a few, then more for rows where a few are not enough. Typical-p
(arXiv 2202.00666) does not keep a prefix, so the whole row is sorted. The caller has subtracted each row's largest
logit and divided by the temperature. Removed tokens are set to -inf in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bridle.cpu_kernels.sampling import MAX_BEST, Cuts
from bridle.model.h2d_copies import upload_list
from bridle.model.sampling.fixed_point_probs import totals, weights_of
from bridle.sampling import SamplingParams

_NEVER = float("-inf")
_HEAD = 128  # number of values that are sorted at first; most nuclei are smaller
_GROWTH = 16


def apply_filters(work: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Apply the filters of `params[i]` to row i of `work` [R, W], in place."""
    width = work.shape[1]
    prefixed = [i for i, p in enumerate(params) if 0 < p.top_k < width or p.top_p < 1.0]
    on_rows(work, prefixed, lambda x, some: _keep_prefix(x, [params[i] for i in some]))
    if any(p.min_p > 0.0 for p in params):
        floor = upload_list([[p.min_p] for p in params], work.dtype, work.device).log()  # the largest logit is 0
        work.masked_fill_(work < floor, _NEVER)
    typical = [i for i, p in enumerate(params) if p.typical_p < 1.0]
    on_rows(work, typical, lambda x, some: _keep_typical(x, [params[i] for i in some]))


def cuts_of(params: Sequence[SamplingParams]) -> Cuts:
    """Return top-k, top-p and min-p of some rows as an argument for the C kernels."""
    top_k = [p.top_k if p.top_k <= MAX_BEST else 0 for p in params]
    return Cuts(top_k, [p.top_p for p in params], torch.tensor([p.min_p for p in params], dtype=torch.float32).log())


def on_rows(work: torch.Tensor, where: list[int], change: Callable[[torch.Tensor, list[int]], None]) -> None:
    """Let the function `change` modify the rows `where` of `work`. If `where` has all rows, `change` gets `work`
    itself; otherwise it gets copies of the rows, which are written back."""
    if not where:
        return
    if len(where) == len(work):
        change(work, where)
        return
    index = upload_list(where, torch.int64, work.device)
    part = work[index]
    change(part, where)
    work[index] = part


# -- top-k and top-p -----------------------------------------------------------------------------------------


def _keep_prefix(x: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Keep the first tokens of each row of `x` [R, W], in descending order of logits, with ties in ascending order of
    ids. At most `top_k` tokens are kept. A token is kept only if the tokens before it have less than `top_p` of the
    total weight of the `top_k` tokens."""
    width, device = x.shape[1], x.device
    ks = [p.top_k if 0 < p.top_k < width else width for p in params]
    top_k = upload_list(ks, torch.int64, device).unsqueeze(1)  # [R, 1], as all below
    top_p = upload_list([p.top_p for p in params], torch.float64, device).unsqueeze(1)
    mass = totals(weights_of(x)).unsqueeze(1) if width in ks else torch.zeros_like(top_p)
    edge = x.new_empty(len(x), 1)  # the smallest logit that is kept
    room = torch.zeros_like(top_k)  # how many tokens with exactly that logit are kept
    tied: list[int] = []  # rows that have more tokens with that logit
    pending = list(range(len(x)))
    size = min(width, max([_HEAD] + [k + 1 for k in ks if k < width]))
    while pending:
        index = upload_list(pending, torch.int64, device)
        part = x if len(pending) == len(x) else x[index]
        values = part.topk(size).values  # [P, size]
        kept = _prefix_length(values, mass[index], top_k[index], top_p[index])
        last = values.gather(1, kept - 1)
        left = kept - (values > last).sum(1, keepdim=True)
        edge[index], room[index] = last, left
        has_more = (values == last).sum(1, keepdim=True) > left
        # The only wait for the device in a round: whether the end of the prefix was found, and whether equal logits
        # follow it.
        states = torch.cat((kept == size, has_more), 1).tolist()
        ends = [size == width or not is_cut for is_cut, _ in states]
        tied += [row for row, is_end, (_, more) in zip(pending, ends, states, strict=True) if is_end and more]
        pending = [row for row, is_end in zip(pending, ends, strict=True) if not is_end]
        size = min(width, size * _GROWTH)
    x.masked_fill_(x < edge, _NEVER)
    if tied:
        _drop_surplus(x, upload_list(tied, torch.int64, device), edge, room)


def _prefix_length(values: torch.Tensor, mass: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return how many of the sorted `values` [P, S] are kept, at least 1: [P, 1]. `mass` is the weight of the whole
    row, for rows without top-k."""
    among = torch.arange(values.shape[1], device=values.device) < top_k  # [P, S]
    weights = weights_of(values).double() * among
    running = weights.cumsum(1)
    total = torch.where(top_k < values.shape[1], running[:, -1:], mass)
    stays = among & (running - weights < top_p * total)
    return stays.sum(1, keepdim=True).clamp_(min=1)


def _drop_surplus(x: torch.Tensor, tied: torch.Tensor, edge: torch.Tensor, room: torch.Tensor) -> None:
    """In the rows `tied`, remove all but the first `room` [R, 1] of the tokens whose logit equals `edge` [R, 1]."""
    part = x[tied]
    equal = part == edge[tied]
    x[tied] = part.masked_fill_(equal & (equal.cumsum(1) > room[tied]), _NEVER)


# -- typical-p -----------------------------------------------------------------------------------------------


def _keep_typical(x: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Keep the tokens whose surprise is closest to the row's expected surprise, up to `typical_p` of the
    weight.

    Surprise is -log p = c - x, where x is the logit and c a constant of the row. So the distance of a surprise to the
    mean needs neither c nor a logarithm.
    """
    top_p = upload_list([p.typical_p for p in params], torch.float64, x.device).unsqueeze(1)
    weights = weights_of(x)
    mass = totals(weights).unsqueeze(1)  # [R, 1]
    costs = torch.where(weights > 0, weights * -x, 0.0).floor_()  # whole numbers below UNIT: exact sums again
    mean = (totals(costs).unsqueeze(1) / mass).float()
    distance = (-x - mean).abs_()  # [R, W]
    ordered, index = distance.sort(dim=1, stable=True)
    running = weights.gather(1, index).double().cumsum_(1)
    last = (running < top_p * mass).sum(1, keepdim=True).clamp_(max=x.shape[1] - 1)
    x.masked_fill_(distance > ordered.gather(1, last), _NEVER)
