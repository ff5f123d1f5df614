"""The cheap client counts what a real server sends, and the figures are made of it."""

from __future__ import annotations

import asyncio

from bridle.bench.serve import _fairness, _quantile
from bridle.bench.sse_client import Sample, Target, closed_loop, complete, open_loop
from tests.http.harness import scripted_model, served


def _target(url: str) -> Target:
    host, _, port = url.removeprefix("http://").partition(":")
    return Target(host, int(port))


def test_samples_tell_what_was_streamed() -> None:
    with served(scripted_model(next_token=lambda prefix: 70 + len(prefix) % 20)) as url:
        target = _target(url)
        whole = asyncio.run(complete(target, [5, 6, 7], 6))
        cut = asyncio.run(complete(target, [5, 6, 7], 400, drop_after=2))
        refused = asyncio.run(complete(target, [-1], 6))
        many = asyncio.run(closed_loop(target, [[5]] * 7, 3, 2))
        arriving = asyncio.run(open_loop(target, [[5]], 3, rate=100, seconds=0.1, weights=(0.5, 0.5)))
        nobody = asyncio.run(complete(Target(target.host, 1), [5], 3))
    assert whole.is_complete and whole.status == 200 and whole.num_tokens == 6 and whole.event_times
    assert len(whole.gaps) == len(whole.event_times) - 1 and whole.first > 0
    assert not cut.is_complete and len(cut.event_times) >= 2 and cut.num_tokens == 0
    assert refused.status == 400 and not refused.event_times
    assert len(many) == 7 and all(each.is_complete for each in many)
    assert arriving and all(each.is_complete for each in arriving)
    assert nobody.status == 0


def test_fairness_is_the_share_of_the_least_served() -> None:
    samples = [Sample(0.0, 200, tenant, 1.0, True, 5 if tenant else 55) for tenant in range(10)]
    samples.append(Sample(0.0, 429, 0, 0.05))
    found = _fairness(samples)
    assert found["least_share"] == 0.5 and found["refusal_p99"] == 0.05
    assert _quantile([], 99) == 0 and _quantile([3.0], 50) == 3.0
