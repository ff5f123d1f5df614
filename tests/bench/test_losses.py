"""The clients of the benchmark of losses read a real server's streams, and detect wrong texts."""

from __future__ import annotations

import asyncio
import signal
import time

from bridle.errors import ShardUnavailable
from dev.bench.loss_streams import Readiness, StreamCrowd
from dev.bench.losses import how_to_lose
from tests.http.harness import saying, scripted_model, served
from tests.waiting import PATIENCE


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def test_clients_stream_again_and_again_and_hear_of_losses() -> None:
    model = scripted_model(next_token=saying("to be or not to be that is"), faults={4: ShardUnavailable("gone")})

    async def read(address: tuple[str, int]) -> StreamCrowd:
        crowd, readiness = StreamCrowd(address, 3, 12), Readiness(address)
        crowd.start()
        await crowd.wait(lambda client: client.num_complete > 2, PATIENCE)
        await readiness.wait(True, 0.0, PATIENCE)
        readiness.stop()
        await crowd.stop()
        return crowd

    with served(model) as url:
        crowd = asyncio.run(read(_address(url)))
    assert crowd.faults == []
    assert sum(client.num_different for client in crowd.clients) == 0
    assert all(len(client.resumed) <= client.is_told for client in crowd.clients)
    assert any(client.resumed for client in crowd.clients)
    for client in crowd.clients:
        assert client.after(0.0) > 0
        assert 0 < client.longest_gap(0.0) < time.perf_counter() - client.times[0]


def test_what_does_not_end_well_is_told() -> None:
    model = scripted_model(next_token=lambda prefix: 70, max_model_len=64)

    async def read(address: tuple[str, int], max_tokens: int) -> StreamCrowd:
        crowd = StreamCrowd(address, 1, max_tokens)
        crowd.start()
        await crowd.wait(lambda client: bool(client.faults) or client.num_complete > 0, PATIENCE)
        await crowd.stop()
        return crowd

    with served(model) as url:
        assert asyncio.run(read(_address(url), 4)).faults == []
        (fault, *_) = asyncio.run(read(_address(url), 100)).faults
    assert "400" in fault


def test_every_fourth_loss_is_a_process_that_hangs() -> None:
    hows = how_to_lose(20)
    assert len(hows) == 20 and hows.count(signal.SIGSTOP) == 5
    assert how_to_lose(2) == [signal.SIGKILL, signal.SIGSTOP]
