"""Tests of the engine in its thread: many clients at once, slow clients, clients that disconnect, and a shutdown after
which no client waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bridle.config import EngineConfig
from bridle.engine.async_engine import AsyncEngine
from bridle.engine.client import EventStream
from bridle.engine.control.decision import Decision
from bridle.engine.engine import Engine
from bridle.engine.request import Request
from bridle.engine.scheduling.step_plan import StepPlan
from bridle.errors import (
    BridleError,
    ContextOverflow,
    EngineClosed,
    EngineFailed,
    InvalidRequest,
    Overloaded,
)
from bridle.outputs import Event, Finished, FinishReason, TokenEvent
from bridle.testing.scripted import ScriptedExecutor
from tests.engine.programs import always
from tests.engine.support import Replay, check_output, make_request, replay
from tests.fakes.controller_runtime import FakeControllerPool
from tests.fakes.reference_engine import run_reference


class Gate:
    """A gate that lets the engine's thread run a given number of forward passes."""

    def __init__(self, is_open: bool = False) -> None:
        self.steps = threading.Semaphore(0)
        self.arrived = threading.Semaphore(0)
        self.is_open = is_open

    def __call__(self, plan: StepPlan) -> None:
        self.arrived.release()
        if not self.is_open:
            self.steps.acquire()

    def open(self) -> None:
        self.is_open = True
        self.steps.release()


class Setup:
    """An engine with its executor, its gate and its asynchronous interface."""

    def __init__(self, gate: Gate, **config: object) -> None:
        self.gate = gate
        self.executor = ScriptedExecutor(num_blocks=64, on_forward=gate)
        self.pool = FakeControllerPool()
        self.engine = Engine(self.executor, EngineConfig(**config), pools=[self.pool])  # type: ignore[arg-type]
        self.front = AsyncEngine(self.engine)

    def check(self, request: Request, events: list[Event]) -> None:
        got = replay(events)[request.id]
        expected = run_reference(self.executor.model, request, max_model_len=256)
        assert set(got.by_path) == set(expected)
        for path, output in got.by_path.items():
            check_output(output, expected[path], request)


@contextmanager
def running(is_open: bool = True, **config: object) -> Iterator[Setup]:
    setup = Setup(Gate(is_open), **config)
    setup.front.start()
    try:
        yield setup
    finally:
        setup.gate.open()
        setup.front.close()
    assert not setup.executor.violations
    assert setup.executor.is_closed
    assert setup.front.num_live == 0


def read(stream: EventStream) -> list[Event]:
    return [event for events in stream for event in events]


def only(events: list[Event]) -> Replay:
    (got,) = replay(events).values()
    return got


def test_events_arrive_in_another_thread() -> None:
    with running() as setup:
        request = make_request(max_tokens=9, n=2)
        setup.check(request, read(setup.front.submit(request)))


def test_an_idle_engine_wakes_up() -> None:
    with running() as setup:
        for number in range(40):
            request = make_request((number % 32,), max_tokens=2)
            setup.check(request, read(setup.front.submit(request)))


def test_a_slow_reader_gets_more_at_once() -> None:
    with running() as setup:
        request = make_request(max_tokens=9)
        stream = setup.front.submit(request)
        setup.front.close(drain=60.0)
        lists = list(stream)
        assert len(lists) == 1
        setup.check(request, lists[0])
        assert stream.read_nowait() is None


def test_a_fast_reader_gets_each_token_as_it_comes() -> None:
    with running(is_open=False) as setup:
        request = make_request(max_tokens=4)
        iterator = iter(setup.front.submit(request))
        lists = []
        for _ in range(4):
            setup.gate.steps.release()
            lists.append(next(iterator))
        assert [len(events) for events in lists] == [2, 1, 1, 2]  # prompt and token, token, token, token and end
        assert next(iterator, None) is None


def test_many_threads_submit_and_cancel() -> None:
    failures: list[BaseException] = []

    def client(setup: Setup, number: int) -> None:
        try:
            for k in range(6):
                request = make_request((number, k), max_tokens=12, seed=number, n=1 + k % 2)
                stream = setup.front.submit(request)
                if (number + k) % 3 == 0:
                    next(iter(stream))
                    setup.front.cancel(request.id)
                    continue
                setup.check(request, read(stream))
        except BaseException as error:
            failures.append(error)

    with running(max_num_seqs=5, max_num_batched_tokens=16) as setup:
        threads = [threading.Thread(target=client, args=(setup, number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    statistics = setup.front.statistics()
    assert statistics.num_free_blocks == statistics.num_blocks
    assert statistics.num_requests == 48


def test_many_readers_in_one_loop() -> None:
    async def client(setup: Setup, number: int) -> None:
        request = make_request((number,), max_tokens=10, seed=number)
        events = [event async for batch in setup.front.submit(request) for event in batch]
        setup.check(request, events)

    async def main(setup: Setup) -> None:
        await asyncio.gather(*(client(setup, number) for number in range(30)))

    with running() as setup:
        asyncio.run(main(setup), debug=True)


def test_readers_in_several_loops() -> None:
    async def client(setup: Setup, number: int) -> None:
        request = make_request((number,), max_tokens=20)
        setup.check(request, [event async for batch in setup.front.submit(request) for event in batch])

    with running() as setup:
        threads = [threading.Thread(target=asyncio.run, args=(client(setup, number),)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


# -- leaving ---------------------------------------------------------------------------------------------------


def cancelled(setup: Setup) -> int:
    """Return how many outputs ended as cancelled, once the engine is idle."""
    setup.gate.open()
    setup.front.close(drain=60.0)
    return setup.front.statistics().finished["cancelled"]


def test_leaving_the_loop_cancels() -> None:
    with running(is_open=False) as setup:
        setup.gate.steps.release(2)
        for events in setup.front.submit(make_request(max_tokens=200)):
            assert events
            break
        assert cancelled(setup) == 1


def test_leaving_a_with_block_cancels() -> None:
    with running(is_open=False) as setup:
        with setup.front.submit(make_request(max_tokens=200)):
            pass
        assert cancelled(setup) == 1


def test_cancelling_a_task_cancels_its_request() -> None:
    async def main(setup: Setup) -> None:
        started = asyncio.Event()

        async def client() -> None:
            async with setup.front.submit(make_request(max_tokens=200)) as stream:
                async for _ in stream:
                    started.set()

        task = asyncio.create_task(client())
        setup.gate.steps.release(1)
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with running(is_open=False) as setup:
        asyncio.run(main(setup))
        assert cancelled(setup) == 1


def test_a_loop_that_is_gone_holds_up_nobody() -> None:
    async def leave(setup: Setup) -> EventStream:
        stream = setup.front.submit(make_request(max_tokens=20))
        setup.gate.steps.release(1)
        async for _ in stream:
            return stream
        raise AssertionError("no events")

    with running(is_open=False) as setup:
        stream = asyncio.run(leave(setup))
        assert stream.loop is not None
        assert stream.loop.is_closed()
        setup.gate.open()
        request = make_request(max_tokens=30)
        setup.check(request, read(setup.front.submit(request)))


def test_a_listener_takes_events_and_leaves_some() -> None:
    async def main(setup: Setup) -> None:
        request = make_request(max_tokens=40)
        stream = setup.front.submit(request)
        got: list[Event] = []
        num_heard, batches = 0, list[list[Event]]()

        def listen(events: list[Event]) -> list[Event] | None:
            nonlocal num_heard
            if isinstance(events[-1], Finished):
                return events
            got.extend(events)
            num_heard += 1
            setup.gate.steps.release()
            return None if num_heard % 3 else []  # now and then it wants a pause

        async for events in stream:
            batches.append(events)
            got += events
            assert stream.listener is None
            stream.listener = listen
            setup.gate.steps.release()
        setup.check(request, got)
        assert num_heard >= 3 and [] in batches[1:] and isinstance(batches[-1][-1], Finished)

    with running(is_open=False) as setup:
        setup.gate.steps.release(2)
        asyncio.run(main(setup))


async def test_a_listener_may_take_the_end() -> None:
    cancelled, heard = list[str](), list[Event]()
    stream = EventStream("r", cancelled.append)

    async def read_all() -> None:
        async for events in stream:
            heard.extend(events)
            stream.listener = heard.extend

    stream.put([TokenEvent("r", 0, 1)])
    reader = asyncio.create_task(read_all())
    await asyncio.sleep(0)
    for events in ([TokenEvent("r", 0, 2)], [TokenEvent("r", 0, 3), Finished("r", 0)]):
        stream.put([*events])
        stream.notify()
    await reader
    assert len(heard) == 4 and not cancelled


@pytest.mark.parametrize("is_broken", [False, True])
async def test_a_reader_whose_listener_fails_or_whose_engine_ends_is_told(is_broken: bool) -> None:
    cancelled, heard = list[str](), list[Event]()
    stream = EventStream("r", cancelled.append)

    def listen(events: list[Event]) -> None:
        heard.extend(events)
        if is_broken and len(heard) == 2:
            raise RuntimeError("a bug")

    async def read_all() -> None:
        async for _ in stream:
            stream.listener = listen

    stream.put([TokenEvent("r", 0, 1)])
    reader = asyncio.create_task(read_all())
    for token in range(2, 4):
        await asyncio.sleep(0)
        stream.put([TokenEvent("r", 0, token)])
        stream.notify()
    if not is_broken:
        stream.fail(EngineClosed("over"))
        stream.notify()
    with pytest.raises(RuntimeError if is_broken else EngineClosed):
        await reader
    assert [event.token for event in heard if isinstance(event, TokenEvent)] == [2, 3]
    assert stream.listener is None and cancelled == ["r"]


def test_cancel_is_told_to_the_reader() -> None:
    with running(is_open=False) as setup:
        stream = setup.front.submit(make_request(max_tokens=200, n=2))
        setup.gate.steps.release(1)
        iterator = iter(stream)
        events = next(iterator)
        setup.front.cancel(stream.request_id)
        setup.gate.open()
        events += [event for batch in iterator for event in batch]
        assert {one.reason for one in only(events).outputs.values()} == {FinishReason.CANCELLED}


def test_a_cancel_right_after_the_submit_is_not_lost() -> None:
    """The request and its cancellation may arrive after the engine has read its inbox and before it checks for
    cancellations."""
    with running(is_open=True) as setup:
        step, streams = setup.engine.step, list[EventStream]()

        def step_with_visitors() -> list[Event]:
            if not streams:
                streams.append(setup.front.submit(make_request(max_tokens=200)))
                setup.front.cancel(streams[0].request_id)
            return step()

        setup.engine.step = step_with_visitors  # type: ignore[method-assign]
        read(setup.front.submit(make_request(max_tokens=30)))
        assert only(read(streams[0])).first.reason is FinishReason.CANCELLED


def test_a_late_cancel_does_not_hit_the_next_request_of_that_name() -> None:
    with running() as setup:
        for _ in range(3):
            request = make_request(id="again", max_tokens=3)
            setup.check(request, read(setup.front.submit(request)))
            setup.front.cancel("again")


# -- refusing --------------------------------------------------------------------------------------------------


def test_bad_requests_are_refused_at_once() -> None:
    with running() as setup:
        with pytest.raises(InvalidRequest, match="prompt is empty"):
            setup.front.submit(make_request(()))
        with pytest.raises(ContextOverflow):
            setup.front.submit(make_request(max_tokens=10_000))
        with pytest.raises(InvalidRequest, match="no controller pool"):
            setup.front.submit(make_request(controller="nobody's"))
        assert setup.front.num_live == 0


def test_an_id_is_taken_until_its_request_is_over() -> None:
    with running(is_open=False) as setup:
        stream = setup.front.submit(make_request(id="x", max_tokens=3))
        with pytest.raises(InvalidRequest, match="id 'x' is running"):
            setup.front.submit(make_request(id="x"))
        setup.gate.open()
        read(stream)
        read(setup.front.submit(make_request(id="x", max_tokens=3)))


def test_a_full_queue_refuses() -> None:
    with running(is_open=False, max_waiting=3, max_num_seqs=1) as setup:
        setup.front.submit(make_request(max_tokens=3))
        setup.gate.arrived.acquire()  # the first is running now, the engine's thread inside its forward pass
        for _ in range(3):
            setup.front.submit(make_request(max_tokens=3))
        with pytest.raises(Overloaded, match="3 requests wait already; at most 3"):
            setup.front.submit(make_request(max_tokens=3))


# -- the end ---------------------------------------------------------------------------------------------------


def test_close_cancels_what_runs_and_tells() -> None:
    with running(is_open=False) as setup:
        streams = [setup.front.submit(make_request(max_tokens=200)) for _ in range(3)]
        setup.gate.arrived.acquire()
        setup.gate.open()
        setup.front.close()
        for stream in streams:
            try:
                events = read(stream)
            except EngineClosed:
                continue
            assert only(events).first.reason in (FinishReason.CANCELLED, FinishReason.LENGTH)


def test_close_with_drain_lets_requests_finish() -> None:
    with running() as setup:
        requests = [make_request(max_tokens=50, seed=number) for number in range(5)]
        streams = [setup.front.submit(request) for request in requests]
        setup.front.close(drain=60.0)
        for request, stream in zip(requests, streams, strict=True):
            setup.check(request, read(stream))


def test_nothing_is_taken_after_the_end() -> None:
    with running() as setup:
        setup.front.close()
        setup.front.close()
        assert not setup.front.is_healthy
        with pytest.raises(EngineClosed):
            setup.front.submit(make_request())


def test_an_engine_that_never_started_can_be_closed() -> None:
    setup = Setup(Gate(True))
    with pytest.raises(EngineClosed, match="it is new"):
        setup.front.submit(make_request())
    setup.front.close()
    assert setup.executor.is_closed


def test_a_reader_that_waits_is_released_by_close() -> None:
    with running(is_open=False) as setup:
        stream = setup.front.submit(make_request(max_tokens=200))
        result: list[object] = []

        def wait() -> None:
            try:
                result.extend(read(stream))
            except BridleError as error:
                result.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        setup.gate.arrived.acquire()
        setup.gate.open()
        setup.front.close()
        thread.join()
        assert result


class BrokenPool(FakeControllerPool):
    def ask(self, asks: object) -> None:
        raise RuntimeError("the pool broke")


def test_a_broken_engine_tells_everybody() -> None:
    gate = Gate(True)
    executor = ScriptedExecutor(on_forward=gate)
    front = AsyncEngine(Engine(executor, pools=[BrokenPool()])).start()
    stream = front.submit(make_request(controller=always(Decision.sample())))
    with pytest.raises(EngineFailed) as told:
        read(stream)
    assert "the pool broke" in str(told.value.__cause__)
    front.close()
    assert not front.is_healthy
    with pytest.raises(EngineFailed):
        front.submit(make_request())
    assert executor.is_closed
