"""Result of a simulation: waiting times of clients, use of prefix caches, and balance of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from dev.simulation.core import CoreWork
from dev.simulation.records import Records, quantiles


@dataclass(frozen=True, slots=True)
class Outcome:
    """Quantiles in seconds: `ttft` until the first token, `latency` until the last token, `pace` between two tokens.

    `hit_rate` is the share of prompt tokens that were found in a prefix cache. `busy_spread` and `token_spread` are
    standard deviations over replicas, relative to the mean. The first is of their busy time, the second of their
    computed tokens. `busy_most` is the longest busy time of a replica, relative to the mean.
    """

    num_requests: int
    num_answered: int
    num_failed: int
    num_turned_away: int
    num_losses: int
    virtual_seconds: float
    wall_seconds: float
    cpu_seconds: float
    rate: float
    ttft: dict[str, float]
    latency: dict[str, float]
    pace: dict[str, float]
    hit_rate: float
    busy: float
    busy_spread: float
    busy_most: float
    token_spread: float
    num_steps: int
    num_tokens: int
    num_preemptions: int


def summarize(
    records: Records,
    works: Sequence[CoreWork],
    *,
    num_requests: int,
    warm_up: float,
    virtual_seconds: float,
    wall_seconds: float,
    cpu_seconds: float,
    num_losses: int,
) -> Outcome:
    """Return the outcome of a simulation from its records. The clients' results exclude the first `warm_up` share of
    all requests."""
    begins = sorted(records.began)
    since = begins[int(warm_up * len(begins))] if begins else 0.0
    counted = records.after(since)
    prompts = sum(records.num_prompt[i] for i in counted)
    busy, tokens = [work.busy_seconds for work in works], [float(work.num_tokens) for work in works]
    return Outcome(
        num_requests=num_requests,
        num_answered=len(records),
        num_failed=records.num_failed,
        num_turned_away=records.num_turned_away,
        num_losses=num_losses,
        virtual_seconds=virtual_seconds,
        wall_seconds=wall_seconds,
        cpu_seconds=cpu_seconds,
        rate=len(counted) / max(begins[-1] - since, 1e-9) if begins else 0.0,
        ttft=quantiles(records.first_at[i] - records.began[i] for i in counted),
        latency=quantiles(records.over_at[i] - records.began[i] for i in counted),
        pace=quantiles(
            (records.over_at[i] - records.first_at[i]) / (records.num_output[i] - 1)
            for i in counted
            if records.num_output[i] > 1
        ),
        hit_rate=sum(records.num_cached[i] for i in counted) / max(prompts, 1),
        busy=fmean(busy) / max(virtual_seconds, 1e-9),
        busy_spread=_spread(busy),
        busy_most=max(busy) / max(fmean(busy), 1e-9),
        token_spread=_spread(tokens),
        num_steps=sum(work.num_steps for work in works),
        num_tokens=sum(work.num_tokens for work in works),
        num_preemptions=sum(work.num_preemptions for work in works),
    )


def _spread(values: Sequence[float]) -> float:
    return pstdev(values) / max(fmean(values), 1e-9)
