"""Samples one of several options by the options' total log-probabilities, as the sampling parameters say."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bridle.sampling import SamplingParams

_UNIT = 1 << 64


def probabilities(scores: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Return the probabilities of the options, which add up to 1. With temperature 0 the best option has probability
    1."""
    best = max(scores)
    if temperature <= 0.0:
        first = scores.index(best)
        return [float(number == first) for number in range(len(scores))]
    weights = [math.exp((score - best) / temperature) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def draw_option(scores: Sequence[float], sampling: SamplingParams, random: int) -> int:
    """Return the index of the option that the random number `random` (below 2**64) selects by temperature, top_k, top_p
    and min_p."""
    chances = probabilities(scores, sampling.temperature)
    order = sorted(range(len(chances)), key=lambda number: -chances[number])
    kept = _kept(order, chances, sampling)
    place = random / _UNIT * sum(chances[number] for number in kept)
    for number in kept:
        place -= chances[number]
        if place < 0.0:
            return number
    return kept[-1]


def _kept(order: list[int], chances: list[float], sampling: SamplingParams) -> list[int]:
    """Return the options of `order` (best first) that may be sampled."""
    most = sampling.top_k if sampling.top_k > 0 else len(order)
    least = sampling.min_p * chances[order[0]]
    kept, total = list[int](), 0.0
    for number in order[:most]:
        if kept and (total >= sampling.top_p or chances[number] < least or not chances[number]):
            break
        kept.append(number)
        total += chances[number]
    return kept
