"""Top-n-sigma, dynamic temperature and XTC. The caller has subtracted each row's largest logit. Removed tokens are set
to -inf in place. Each function gets only the rows that use its sampling method.

Top-n-sigma (Tang et al., arXiv 2411.07641): a token is kept if its logit is at most n standard deviations below the
largest one. This deviation is that of the logits of all allowed tokens, before the temperature. So the temperature does
not change which tokens are kept.

Dynamic temperature (kalomaze, llama.cpp pull request 4972): the temperature is temperature - range if the next token is
certain, and temperature + range if all tokens are equally likely. In between, the temperature grows with the normalized
entropy (entropy divided by its largest possible value) to the power of the exponent.

XTC, "exclude top choices" (p-e-w, text-generation-webui pull request 6335), acts with a given probability. XTC removes
all tokens with a probability of at least `threshold`, except for the least likely token among them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bridle.model.h2d_copies import upload_list
from bridle.model.sampling.fixed_point_probs import UNIT, totals, weights_of
from bridle.sampling import SamplingParams

_NEVER = float("-inf")
#: Logits are counted in steps of 1 / `_STEPS`, down to `_DEPTH` below the largest. So sums of them and of their squares
#: over 2**19 tokens are exact in 64 bits.
_STEPS, _DEPTH = 2.0**12, 512.0


def cut_sigma(x: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Apply top-n-sigma to rows `x` [R, W]."""
    there = x > _NEVER
    steps = (x.clamp(min=-_DEPTH) * _STEPS).round_().to(torch.int64).masked_fill_(~there, 0)
    count = there.sum(1, keepdim=True).clamp_(min=1).double()  # [R, 1], as all below
    mean = steps.sum(1, keepdim=True).double() / count
    variance = (steps.square().sum(1, keepdim=True).double() / count - mean.square()).clamp_(min=0.0)
    number = upload_list([[p.top_n_sigma] for p in params], torch.float64, x.device)
    edge = -(number * variance.sqrt() / _STEPS).float()
    x.masked_fill_(x < edge, _NEVER)


def dynamic_temperatures(x: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the temperatures of rows `x` [R, W]: float32 [R, 1]."""
    weights = weights_of(x)
    total = totals(weights).unsqueeze(1)  # [R, 1], as all below
    costs = torch.where(weights > 0, weights * -x, 0.0).floor_()  # whole numbers: exact sums
    entropy = (total / UNIT).log() + totals(costs).unsqueeze(1) / total
    count = (x > _NEVER).sum(1, keepdim=True).clamp_(min=2).double()
    share = (entropy / count.log()).clamp_(0.0, 1.0)
    low, high, exponent = (
        upload_list([[value] for value in values], torch.float64, x.device)
        for values in (
            [max(p.temperature - p.dynatemp_range, 0.0) for p in params],
            [p.temperature + p.dynatemp_range for p in params],
            [p.dynatemp_exponent for p in params],
        )
    )
    return (low + (high - low) * share.pow(exponent)).float()


def exclude_top(x: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Apply XTC to rows `x` [R, W], whose random numbers were below the XTC probability."""
    weights = weights_of(x).double()
    threshold = upload_list([[p.xtc_threshold] for p in params], torch.float64, x.device)
    is_top = (weights >= threshold * totals(weights).unsqueeze(1)) & (weights > 0)
    least = x.masked_fill(~is_top, float("inf")).amin(1, keepdim=True)
    ids = torch.arange(x.shape[1], device=x.device)
    kept = torch.where(is_top & (x == least), ids, -1).amax(1, keepdim=True)  # the last of equal logits
    x.masked_fill_(is_top & (ids != kept), _NEVER)
