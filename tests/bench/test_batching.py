"""What `bridle bench batching` sends, and when. Times are never asserted, only their order."""

from __future__ import annotations

import asyncio
from functools import partial

from bridle.bench.sse_client import ServerTarget
from bridle.cli.options import EngineOptions
from bridle.cli.serve import ServerOptions
from dev.bench.batching import Arrival, _find_capacity, as_they_come, in_batches, make_arrivals, variants
from tests.http.harness import scripted_model, served


def arrivals_at(*times: float) -> list[Arrival]:
    return [Arrival(at, (5, 6, 7), 3) for at in times]


def target_of(url: str) -> ServerTarget:
    host, _, port = url.removeprefix("http://").partition(":")
    return ServerTarget(host, int(port))


def test_arrivals_are_mixed_in_order_and_the_same_again() -> None:
    arrivals = make_arrivals(40, 500)
    assert arrivals == make_arrivals(40, 500) != make_arrivals(40, 500, seed=1)
    assert [each.at for each in arrivals] == sorted(each.at for each in arrivals)
    lengths = [len(each.prompt) for each in arrivals]
    assert min(lengths) < 64 and max(lengths) > 256
    assert all(0 <= token < 500 for each in arrivals for token in each.prompt)


def test_batches_wait_for_their_last_member_and_for_each_other() -> None:
    with served(scripted_model(next_token=lambda prefix: 70 + len(prefix) % 20)) as url:
        target = target_of(url)
        alone = asyncio.run(as_they_come(target, arrivals_at(0.0, 0.01, 0.02)))
        batched = asyncio.run(in_batches(target, arrivals_at(0.0, 0.02, 0.02, 0.02, 0.03), size=2))
    assert all(each.is_complete and each.num_tokens == 3 for each in alone + batched)
    first, second, third = batched[:2], batched[2:4], batched[4:]
    assert first[0].event_times[0] > first[1].sent  # the first one waits for the second to arrive
    for before, after in ((first, second), (second, third)):
        assert max(each.ended for each in before) <= min(each.event_times[0] for each in after)


def test_what_can_be_borne_is_counted() -> None:
    with served(scripted_model(next_token=lambda prefix: 70)) as url:
        server = type("Server", (), {"target": target_of(url)})
        assert asyncio.run(_find_capacity(server, arrivals_at(0, 0, 0))) > 0  # type: ignore[arg-type]


def test_every_flag_exists() -> None:
    """A misspelt flag would only show when the server is started."""
    known = {
        f"--{name.replace('_', '-')}" for kind in (EngineOptions, ServerOptions) for name in kind.__dataclass_fields__
    }
    known |= {"--max-batch-size", "--max-concurrent-requests", "--no-chunked-prefill"}
    found = variants(4)
    assert {flag for each in found for flag in each.flags if flag.startswith("--")} <= known
    assert isinstance(found[2].deliver, partial) and found[2].deliver.keywords == {"size": 4}
