"""The clients of the benchmark of crowds behave as documented, with a server in this process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from bridle.bench.serve_process import HttpServer
from bridle.bench.sse_client import ServerTarget
from bridle.http.server import websocket_protocol
from bridle.http.settings import HttpSettings
from bridle.lmtp.server import websocket_front
from bridle.serving.tenancy.loop_throttle import RateBudget
from bridle.structured_output import parse
from dev.bench.crowd_clients import (
    FRAMES,
    Asker,
    ClientCrowd,
    CrowdTally,
    Flooder,
    HalfSent,
    Member,
    Silent,
    ask,
    ask_health,
    http_request,
)
from dev.bench.crowd_constraints import constrained_bodies, hostile_constraints, ordinary_constraint
from dev.bench.crowds import watching
from tests.http.harness import scripted_model, served
from tests.waiting import PATIENCE, until_async

BODY = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}


def target_of(url: str) -> ServerTarget:
    host, _, port = url.removeprefix("http://").partition(":")
    return ServerTarget(host, int(port))


@asynccontextmanager
async def crowd_of(
    target: ServerTarget, member: Callable[[CrowdTally], Member], count: int = 2
) -> AsyncIterator[CrowdTally]:
    tally = CrowdTally()
    async with ClientCrowd(target, count, lambda number: member(tally)):
        yield tally


@pytest.mark.parametrize("frame", FRAMES, ids=["text", "ping", "message"])
def test_a_flood_sends_as_long_as_the_server_reads(frame: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[object] = []
    real = websocket_protocol.BoundedFrameReader.go_on

    def go_on(protocol: Any) -> None:
        real(protocol)
        handled.append(protocol)

    monkeypatch.setattr(websocket_protocol.BoundedFrameReader, "go_on", go_on)
    # A flood does not answer pings. How many of their intervals pass here is up to the machine, as is how much of it is
    # handled: it may well be more than a connection is allowed.
    monkeypatch.setattr(websocket_protocol.BoundedFrameReader, "start_keepalive", lambda protocol: None)
    monkeypatch.setattr(RateBudget, "charge", lambda *_: None)

    async def main(target: ServerTarget) -> None:
        async with crowd_of(target, lambda tally: Flooder(target, tally, frame)) as tally:
            await until_async(lambda: tally.frame_bytes > 1 << 17 and len(handled) > 20)
            assert (await ask(target, "/v1/models"))[0] == 200
        assert tally.num_opened == 2  # the server closed none of them

    with served(scripted_model(), fronts=[websocket_front()]) as url:
        asyncio.run(main(target_of(url)))


def test_who_is_refused_asks_again_over_the_same_connection() -> None:
    async def main(target: ServerTarget) -> None:
        async with crowd_of(
            target, lambda tally: Asker(http_request(target, "/v1/completions", BODY), tally), 8
        ) as tally:
            await until_async(lambda: all(len(tally.answers.get(status, [])) > 8 for status in (200, 429)))
        assert set(tally.answers) == {200, 429} and tally.num_opened == 8
        assert all(took > 0 for times in tally.answers.values() for took in times)

    with served(scripted_model(), HttpSettings(max_requests=1)) as url:
        asyncio.run(main(target_of(url)))


def test_who_does_not_read_keeps_what_was_sent() -> None:
    model = scripted_model()

    async def main(target: ServerTarget) -> None:
        request = http_request(target, "/v1/completions", BODY | {"stream": True})
        async with crowd_of(target, lambda tally: Silent(request, tally)) as silent:
            await until_async(lambda: model.client.statistics().finished["length"] == 2)
        assert silent.num_opened == 2 and not silent.answers

    with served(model, HttpSettings(receive_timeout=PATIENCE, send_timeout=PATIENCE)) as url:
        asyncio.run(main(target_of(url)))


def test_a_half_request_is_given_up_and_comes_again() -> None:
    async def main(target: ServerTarget) -> None:
        request = http_request(target, "/v1/completions", BODY)
        async with crowd_of(target, lambda tally: HalfSent(request[:-5], tally)) as half:
            await until_async(lambda: half.num_opened > 4)

    with served(scripted_model(), HttpSettings(receive_timeout=0.05)) as url:
        asyncio.run(main(target_of(url)))


def test_a_silent_reader_reads_nothing() -> None:
    class Watched(Silent):
        def data_received(self, data: bytes) -> None:
            raise AssertionError(f"it read {data!r}")

    asked = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(5) == b"hello"
        writer.write(b"a" * 10)
        await writer.drain()
        asked.set()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        target = ServerTarget(*server.sockets[0].getsockname()[:2])
        tally = CrowdTally()
        member = Watched(b"hello", tally)
        async with ClientCrowd(target, 1, lambda number: member):
            await asyncio.wait_for(asked.wait(), PATIENCE)
            for _ in range(20):
                await asyncio.sleep(0)
            assert not member.lost.is_set() and tally.num_opened == 1
        server.close()

    asyncio.run(main())


def test_watchers_tell_of_streams_health_and_memory() -> None:
    async def main(target: ServerTarget) -> None:
        server = HttpServer(target, psutil.Process(os.getpid()))
        async with watching(server, 2) as seen:
            assert (await ask(target, "/v1/completions", BODY))[0] == 200
            over = asyncio.Event()
            other = asyncio.create_task(ask_health(target, over, 0.001))
            assert (await ask(target, "/nowhere"))[0] == 404
            over.set()
            await other
        assert seen.streams and all(stream.is_complete and stream.num_tokens == 64 for stream in seen.streams)
        assert len(seen.gaps) == sum(len(stream.event_times) - 1 for stream in seen.streams)
        assert seen.late and all(late > 0 for late in seen.late)
        assert seen.peak > 1

    with served(scripted_model()) as url:
        asyncio.run(main(target_of(url)))


def test_constraints_are_requests_that_are_understood() -> None:
    hostile = hostile_constraints()
    assert len(hostile) >= 13
    for constraint in (*hostile.values(), ordinary_constraint(1)):
        parse(constraint)
    assert ordinary_constraint(1) != ordinary_constraint(2)

    async def main(target: ServerTarget) -> None:
        bodies = constrained_bodies({"choice": ["ab"]})
        for path, body in bodies.items():
            status, _, content = await ask(target, path, body)
            assert status == 200 and b'"ab"' in content, path
            status, _, _ = await ask(target, path, constrained_bodies({"choice": []})[path])
            assert status in (400, 422), path

    with served(scripted_model()) as url:
        asyncio.run(main(target_of(url)))
