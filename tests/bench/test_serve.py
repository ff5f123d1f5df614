"""The benchmark's client counts what a real server sends, and the figures are computed from these counts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from bridle.bench.load_report import Row, best, quantile, row_of
from bridle.bench.sse_client import Sample, ServerTarget, closed_loop, complete, open_loop
from tests.http.harness import scripted_model, served


def _target(url: str) -> ServerTarget:
    host, _, port = url.removeprefix("http://").partition(":")
    return ServerTarget(host, int(port))


def test_samples_tell_what_was_streamed() -> None:
    goes_on = threading.Event()

    def next_token(prefix: Sequence[int]) -> int:
        if len(prefix) > 50:
            goes_on.wait(60)  # so that a stream cannot be over before it is cut
        return 70 + len(prefix) % 20

    with served(scripted_model(next_token=next_token)) as url:
        target = _target(url)
        whole = asyncio.run(complete(target, [5, 6, 7], 6))
        cut = asyncio.run(complete(target, [5, 6, 7], 400, drop_after=1))
        goes_on.set()
        refused = asyncio.run(complete(target, [-1], 6))
        many = asyncio.run(closed_loop(target, [[5]] * 7, 3, 2))
        arriving = asyncio.run(open_loop(target, [[5]], 3, rate=100, seconds=0.1))
        nobody = asyncio.run(complete(ServerTarget(target.host, 1), [5], 3))
    assert whole.is_complete and whole.status == 200 and whole.num_tokens == 6
    assert 1 <= len(whole.event_times) <= 6
    assert len(whole.gaps) == len(whole.event_times) - 1 and whole.first > 0
    assert not cut.is_complete and cut.event_times and cut.num_tokens == 0
    assert refused.status == 400 and not refused.event_times
    assert len(many) == 7 and all(each.is_complete for each in many)
    assert arriving and all(each.is_complete for each in arriving)
    assert nobody.status == 0


def _sample(sent: float, times: list[float], status: int = 200) -> Sample:
    return Sample(sent, status, sent + 1, bool(times), len(times), times)


def test_a_row_counts_and_measures() -> None:
    quick = _sample(0.0, [0.5, 0.6, 0.7])
    slow = _sample(0.0, [3.0, 3.1])  # its first token comes too late
    sluggish = _sample(0.0, [1.0, 1.1, 3.0])  # and the others of this one
    refused, broken = _sample(0.0, [], status=429), _sample(0.0, [], status=200)
    row = row_of("load", [quick, slow, sluggish, refused, broken], 2.0, 0.1, 0.2)
    assert (row.requests, row.refused, row.failed) == (5, 1, 1)
    assert (row.tokens_per_second, row.requests_per_second, row.goodput) == (4.0, 1.5, 0.5)
    assert row.first_p50 == 1.0 and row.gap_p99 == pytest.approx(1.9, rel=0.1)
    assert best([row, row_of("other", [quick], 0.1, 0, 0)]).load == "other"
    assert isinstance(row, Row)


def test_percentiles_of_none_or_one_are_told() -> None:
    assert quantile([], 99) == 0 and quantile([3.0], 50) == 3.0
