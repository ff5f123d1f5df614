"""Tests of streams that are not read to their end: their requests end when the streams are released."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bridle import LLM, Controller, Decision
from bridle.config import EngineConfig
from bridle.controllers import SequenceView
from bridle.engine import AsyncEngine
from bridle.engine.async_engine import WakeupQueue
from bridle.llm.streams import TextStream
from tests.http.harness import scripted_model
from tests.waiting import PATIENCE, until, until_async


class Waits(Controller):
    """A controller that samples two tokens, and then waits without end."""

    max_rewind = 0  # so that text is certain at once

    def next(self, view: SequenceView) -> Decision:
        return Decision.sample() if len(view.generated) < 2 else Decision.wait()


@pytest.fixture
def llm() -> Iterator[LLM]:
    model = scripted_model(next_token=lambda prefix: 70, config=EngineConfig(max_idle_steps=1 << 60))
    with LLM(model) as loaded:
        yield loaded
    model.close()


def endless(llm: LLM, **options: Any) -> TextStream:
    return llm.stream("ab", controller=Waits(), max_tokens=100, **options)


def client_of(llm: LLM) -> AsyncEngine:
    client = llm.model.client
    assert isinstance(client, AsyncEngine)
    return client


def idle(llm: LLM) -> Callable[[], bool]:
    return lambda: client_of(llm).num_live == 0


WAYS: dict[str, Callable[[TextStream], object]] = {
    "not at all": lambda stream: None,
    "a piece": lambda stream: next(iter(stream)),
    "deltas": lambda stream: next(iter(stream.deltas())),
    "outputs": lambda stream: next(iter(stream.outputs())),
    "another reader, not begun": lambda stream: stream.pieces(),
}


@pytest.mark.parametrize("how", WAYS)
def test_a_stream_that_is_let_go_of_ends(llm: LLM, how: str) -> None:
    read = WAYS[how](endless(llm))
    del read
    until(idle(llm), "an idle engine")  # nothing was collected but by counting references


def test_it_goes_on_while_a_reader_of_it_is_held(llm: LLM) -> None:
    deltas = iter(endless(llm).deltas())
    gc.collect()
    assert next(deltas).text
    assert client_of(llm).num_live == 1
    del deltas
    until(idle(llm), "an idle engine")


def test_one_in_a_cycle_ends_when_that_is_collected(llm: LLM) -> None:
    cycle: list[object] = [endless(llm)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    until(idle(llm), "an idle engine")


def test_an_asynchronous_one_ends_as_well(llm: LLM) -> None:
    async def main() -> None:
        pieces = aiter(endless(llm))
        assert await anext(pieces)
        del pieces
        await until_async(idle(llm), "an idle engine")
        endless(llm)
        await until_async(idle(llm), "an idle engine")

    asyncio.run(main())


def test_a_session_forgets_a_turn_that_nobody_reads(llm: LLM) -> None:
    session = llm.session(controller=Waits())
    session.stream("hello")
    until(idle(llm), "an idle engine")
    assert [message["role"] for message in session.messages] == []


class CollectsInside:
    """A lock during which the last reference to a stream is dropped, which may happen at any lock."""

    def __init__(self, held: list[object]) -> None:
        self.lock, self.held = threading.Lock(), held

    def __enter__(self) -> None:
        self.lock.acquire()
        self.held.clear()

    def __exit__(self, *exc_info: object) -> None:
        self.lock.release()


def test_collecting_one_waits_for_no_lock(llm: LLM) -> None:
    client = client_of(llm)
    held: list[object] = [endless(llm)]
    client._lock = CollectsInside(held)  # type: ignore[assignment]
    caller = threading.Thread(target=client.release_retained_kv, args=("nobody",), daemon=True)
    caller.start()
    caller.join(PATIENCE)
    assert not caller.is_alive() and not held
    until(idle(llm), "an idle engine")


def test_a_cancelled_id_may_be_used_again(llm: LLM) -> None:
    """A late cancellation does not affect a new request with the same id."""
    client = client_of(llm)
    stream = endless(llm)
    stream.cancel()
    until(idle(llm), "an idle engine")
    events = client.submit(stream.request)
    del stream
    gc.collect()
    assert client.num_live == 1
    events.cancel()
    until(idle(llm), "an idle engine")


def test_a_bell_wakes_whoever_waits() -> None:
    bell = WakeupQueue()
    bell.wait(0.0)
    bell.set()
    bell.set()
    bell.wait()
    bell.clear()
    bell.wait(0.0)
