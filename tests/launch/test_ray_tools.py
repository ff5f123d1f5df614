"""Tests of tools on a Ray cluster without Ray: front and engines exchange messages within this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from bridle.config import EngineConfig
from bridle.controller_tools import ToolExecutor
from bridle.controllers import PythonControllerPool
from bridle.controllers.composite_pool import with_composed
from bridle.distributed.remote_tools import RemoteToolExecutor
from bridle.distributed.replica_messages import encode, read_by_replica, read_by_router
from bridle.distributed.tool_messages import ToolAnswered, ToolAsked, ToolGivenUp, ToolMessage, ToolsElsewhere
from bridle.engine import AsyncEngine, Engine, Request
from bridle.errors import InvalidRequest
from bridle.launch.ray import RaySettings, build_app
from bridle.launch.ray.files import read_files
from bridle.launch.ray.tools import EngineCalls, FrontCalls
from bridle.outputs import Event
from bridle.testing.text import PieceDecoder
from tests.distributed.replica_kit import PIECES, make_executor
from tests.distributed.tools_kit import SIZE, Tools, asks, desk_of, tools, written
from tests.engine.support import Replay, make_request, replay
from tests.waiting import PATIENCE, until

__all__ = ["tools"]  # a fixture


class LocalEngine:
    """An engine with the parts for tool calls that run in an engine's process."""

    def __init__(self, desk: ToolExecutor, address: str) -> None:
        far = RemoteToolExecutor(ToolsElsewhere(desk.names, desk.of_clients, desk.limits))
        self.calls = EngineCalls(far, address)
        pools = with_composed([PythonControllerPool(SIZE, far, lambda text: [ord(char) % SIZE for char in text])], SIZE)
        self.client = AsyncEngine(Engine(make_executor(), EngineConfig(), decoder=PieceDecoder(PIECES), pools=pools))
        far.watch(self.client.wake)
        self.client.start()

    async def generate(self, request: Request) -> AsyncIterator[list[Event] | bytes]:
        stream = self.client.submit(request)
        async with stream, contextlib.aclosing(self.calls.merged(stream)) as merged:
            async for news in merged:
                yield encode(news) if isinstance(news, ToolMessage) else news


class Cluster:
    """A front for tool calls, and engines by address."""

    def __init__(self, desk: ToolExecutor, *addresses: str) -> None:
        self.engines = {address: LocalEngine(desk, address) for address in addresses}
        self.front = FrontCalls(desk, self.send)
        self.num_refused = 0

    async def send(self, address: str, message: ToolAnswered) -> None:
        if self.num_refused:
            self.num_refused -= 1
            raise ConnectionError(address)
        again = read_by_replica(encode(message))
        assert isinstance(again, ToolAnswered)
        self.engines[address].calls.answer(again)

    async def run(self, address: str, request: Request, until_asked: asyncio.Event | None = None) -> Replay | None:
        """Run a request on one engine to its end; with `until_asked` given, stop at its first tool call."""
        events: list[Event] = []
        async with contextlib.aclosing(self.engines[address].generate(request)) as stream:
            async for news in stream:
                if isinstance(news, list):
                    events += news
                    continue
                message = read_by_router(news)
                assert isinstance(message, (ToolAsked, ToolGivenUp)) and message.replica == address
                self.front.handle(request, message)
                if until_asked is not None:
                    return None
        self.front.forget(request.id)
        (got,) = replay(events).values()
        return got

    def close(self) -> None:
        for engine in self.engines.values():
            engine.client.close()


@contextlib.contextmanager
def cluster(desk: ToolExecutor, *addresses: str) -> Iterator[Cluster]:
    """Yield a cluster of engines; the caller must be in an event loop."""
    made = Cluster(desk, *addresses)
    try:
        yield made
    finally:
        made.close()
        desk.close()


def test_controllers_of_engines_call_tools_of_their_front(tools: Tools) -> None:
    async def main() -> None:
        with cluster(desk_of(tools), "one", "two") as made:
            controllers = [asks(("count", {"key": f"k{number}"}), ("none", {})) for number in range(6)]
            running = [
                made.run(("one", "two")[number % 2], make_request(controller=controller))
                for number, controller in enumerate(controllers)
            ]
            for number, got in enumerate(await asyncio.wait_for(asyncio.gather(*running), PATIENCE)):
                assert got is not None and got.outputs[0].tokens[:3] == written(f"k{number}1")[:3]
                assert "unknown tool; available tools: count, waits, hangs" in got.outputs[0].logs
            assert all(not engine.calls.streams and not engine.calls.askers for engine in made.engines.values())

    asyncio.run(main())


def test_an_answer_that_does_not_arrive_is_sent_again(tools: Tools) -> None:
    async def main() -> None:
        with cluster(desk_of(tools), "one") as made:
            made.num_refused = 2
            got = await asyncio.wait_for(
                made.run("one", make_request(controller=asks(("count", {"key": "a"})))), PATIENCE
            )
            assert got is not None and got.outputs[0].tokens == written("a1")
            assert made.num_refused == 0 and tools.num == {"a": 1}

    asyncio.run(main())


def test_a_lost_engines_calls_are_not_made_again(tools: Tools) -> None:
    """A tool call of a lost engine continues, and its answer goes to the engine that runs the request now."""

    async def main() -> None:
        with cluster(desk_of(tools), "one", "two") as made:
            request = make_request(controller=asks(("waits", {"key": "b"}), ("count", {"key": "c"})))
            assert await made.run("one", request, asyncio.Event()) is None
            assert made.front.begin_again(request.id) is None
            running = asyncio.create_task(made.run("two", request))
            await asyncio.to_thread(tools.is_reached.wait, PATIENCE)
            tools.is_open.set()
            got = await asyncio.wait_for(running, PATIENCE)
            assert got is not None and got.outputs[0].tokens == written("b1c1")
            assert tools.num == {"b": 1, "c": 1}
            assert not made.front.calls.books and not made.front.calls.asked

    asyncio.run(main())


def test_a_request_that_is_over_has_no_calls_left(tools: Tools) -> None:
    async def main() -> None:
        with cluster(desk_of(tools), "one") as made:
            request = make_request(controller=asks(("hangs", {})))
            assert await made.run("one", request, asyncio.Event()) is None
            await asyncio.to_thread(tools.is_reached.wait, PATIENCE)
            made.front.forget(request.id)
            assert await asyncio.to_thread(tools.was_cancelled.wait, PATIENCE)
            assert not made.engines["one"].calls.streams
            late = RemoteToolExecutor(ToolsElsewhere(("count",)))
            EngineCalls(late, "two")
            assert late.begin("count").error == "the front is gone"

    asyncio.run(main())


def test_a_client_answers_at_its_front() -> None:
    async def main() -> None:
        desk = ToolExecutor()
        with cluster(desk, "one") as made:
            request = make_request(controller=asks(("ask", {"what": "?"})), client_tools=("ask",), tenant="ann")
            running = asyncio.create_task(made.run("one", request))
            await asyncio.to_thread(until, lambda: bool(desk.asked_of("ann")))
            desk.answer(desk.asked_of("ann")[0][0], "ann", "yes")
            got = await asyncio.wait_for(running, PATIENCE)
            assert got is not None and got.outputs[0].tokens == written("yes")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("tools", "[tools.x]\nhttp = []\n", "tools.x: http is empty"),
        ("tools", None, "cannot be read"),
        ("policies", "[[policy]]\nname = 'x'\n", "x"),
        ("policies", None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_before_anything_is_deployed(
    name: str, content: str | None, why: str, tmp_path: Path
) -> None:
    file = tmp_path / "file.toml"
    if content is not None:
        file.write_text(content)
    settings: dict[str, Any] = {name: str(file)}
    with pytest.raises(InvalidRequest, match=why):
        build_app(settings)


def test_engines_are_told_of_tools_and_fronts_are_replaced_when_a_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "tools.toml"
    file.write_text(
        '[limits]\nmax_calls = 3\n[tools.ask]\nclient = "Asks."\n[tools.wiki]\nhttp = ["GET https://a.org/"]\n'
    )
    settings = RaySettings.parse({"tools": str(file)})
    assert settings.for_fronts().tools == str(file)
    tools, version = read_files(settings)
    assert (tools.names, tools.of_clients, tools.limits.max_calls) == (("ask", "wiki"), ("ask",), 3)
    file.write_text('[tools.ask]\nclient = "Asks."\n')
    assert read_files(settings).version != version
