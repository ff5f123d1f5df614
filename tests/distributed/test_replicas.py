"""Tests that several replicas behave like one engine, even if some of them are lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import count, pairwise
from random import Random
from typing import Any

import pytest

from bridle.config import EngineConfig
from bridle.distributed import replica_messages
from bridle.distributed.live_request import RoutedRequest
from bridle.distributed.prefix_router import RUNNING_TOKENS, PrefixChoice, PrefixRouter
from bridle.distributed.replica_messages import WireEvent
from bridle.distributed.replicas import ReplicaSet
from bridle.engine import AsyncEngine, Engine, Request
from bridle.engine.client import EventStream
from bridle.errors import (
    ContextOverflow,
    EngineClosed,
    InvalidRequest,
    Overloaded,
    ProtocolError,
    ShardUnavailable,
    UnsupportedFeature,
)
from bridle.outputs import Event, Finished, FinishReason, PromptEvent, PromptProgress, Resuming, TokenEvent
from bridle.structured_output import Regex
from bridle.testing.scripted import ScriptedExecutor
from bridle.testing.text import PieceDecoder
from tests.distributed.replica_kit import PIECES, make_executor, replicated
from tests.engine.random_labs import random_request
from tests.engine.support import make_request, replay
from tests.waiting import PATIENCE, until


def read(client: Any, requests: list[Request]) -> dict[str, list[Event]]:
    """Return all events of all requests, which run at the same time."""
    streams = [client.submit(request) for request in requests]
    return {stream.request_id: [event for events in stream for event in events] for stream in streams}


def essence(events: dict[str, list[Event]]) -> object:
    """Return the clients' data in an order that does not depend on the replicas."""
    found = {}
    for request_id, each in events.items():
        (got,) = replay([event for event in each if not isinstance(event, Resuming)]).values()
        found[request_id] = sorted(
            (one.path, tuple(one.tokens), one.text, one.reason, tuple(one.logprobs)) for one in got.outputs.values()
        )
    return found


def expected(requests: list[Request]) -> object:
    with AsyncEngine(Engine(make_executor(), decoder=PieceDecoder(PIECES))) as engine:
        return essence(read(engine, requests))


def some_requests(count: int, seed: int = 0, **fields: object) -> list[Request]:
    random = Random(seed)
    return [
        random_request(random, controller=None, adapter=None, id=f"r{seed}-{i}", seed=i, **fields) for i in range(count)
    ]


def test_two_replicas_say_what_one_engine_says() -> None:
    requests = some_requests(40)
    with replicated() as made:
        assert essence(read(made.client, requests)) == expected(requests)
        shares = [replica.engine.statistics().num_requests for replica in made.replicas]
        assert sum(shares) == 40
        assert min(shares) > 5


def test_a_replicas_load_is_what_it_has_to_compute() -> None:
    """A cached prompt adds little load, so that a replica with such prompts does not look busier than others."""
    loads: list[list[float]] = []

    class Watching(PrefixRouter):
        def choose(
            self, prompt: Sequence[int], salt: object, given: Sequence[float], key: str = ""
        ) -> PrefixChoice | None:
            loads.append(list(given))
            return super().choose(prompt, salt, given)

    gate = Gate(1)
    with replicated(1, make=lambda: make_executor(on_forward=gate), make_router=Watching) as made:
        prompt = tuple(range(30))
        for length in (30, 30, 10):
            made.client.submit(make_request(prompt[:length], max_tokens=2))
        gate.is_open.set()
    steps = [after[0] - before[0] for before, after in pairwise(loads)]
    assert steps == [30 + RUNNING_TOKENS, 2 + RUNNING_TOKENS]  # 28 tokens are whole blocks of 4


class Gate:
    """A device that stops after some steps until the test lets it continue."""

    def __init__(self, num_steps: int) -> None:
        self._left = num_steps
        self.is_reached, self.is_open = threading.Event(), threading.Event()

    def __call__(self, plan: object) -> None:
        self._left -= 1
        if self._left == 0:
            self.is_reached.set()
            self.is_open.wait(PATIENCE)


def test_a_router_knows_how_far_a_prompt_is() -> None:
    gate = Gate(3)
    config = EngineConfig(max_batch_prefill_tokens=16)
    with replicated(1, make=lambda: make_executor(on_forward=gate), config=config) as made:
        request = make_request([1] * 100, max_tokens=2)
        stream = made.client.submit(request)
        until(lambda: stream.prompt == PromptProgress(request.id, 0, 32), "the router hears of two steps")
        gate.is_open.set()
        events = [event for each in stream for event in each]
        assert isinstance(stream.prompt, PromptEvent)
        assert not any(isinstance(event, PromptProgress) for event in events)


@pytest.mark.parametrize("n", [1, 2], ids=["continued", "begun again"])
def test_what_a_lost_replica_held_goes_on_elsewhere(n: int) -> None:
    requests = some_requests(12, n=n, max_tokens=20, ignore_eos=True, stop=(), stop_token_ids=(), prompt_logprobs=None)
    gates = [Gate(9), Gate(9)]
    pending = list(gates)
    with replicated(make=lambda: make_executor(on_forward=pending.pop())) as made:
        streams = [made.client.submit(request) for request in requests]
        for gate in gates:
            gate.is_reached.wait(PATIENCE)
        made.replicas[0].cut()  # in the middle of a step
        for gate in gates:
            gate.is_open.set()
        events = {stream.request_id: [event for each in stream for event in each] for stream in streams}
        assert essence(events) == expected(requests)
        assert made.client.num_losses == 1
        assert made.client.is_healthy


def test_those_who_ask_hear_that_their_replica_is_lost() -> None:
    gate = Gate(5)
    with replicated(1, make=lambda: make_executor(on_forward=gate)) as made:
        stream = made.client.submit(make_request(max_tokens=30, tell_resuming=True, ignore_eos=True))
        gate.is_reached.wait(PATIENCE)
        made.replicas[0].cut()  # in the middle of a step
        gate.is_open.set()
        made.lose(0)
        made.restart(0, make_executor())
        events = [event for each in stream for event in each]
        assert sum(isinstance(event, Resuming) for event in events) == 1
        assert sum(isinstance(event, TokenEvent) for event in events) == 30


def test_without_replicas_requests_wait_and_deadlines_pass() -> None:
    with replicated(1) as made:
        made.lose(0)
        late = make_request(deadline=time.monotonic())
        waiting, cancelled = make_request(max_tokens=4, ignore_eos=True), make_request()
        streams = [made.client.submit(request) for request in (late, waiting, cancelled)]
        streams[2].cancel()
        made_events = [[event for each in streams[i] for event in each] for i in (0, 2)]
        reasons = [each[-1].reason for each in made_events]  # type: ignore[attr-defined]
        assert reasons == [FinishReason.DEADLINE, FinishReason.CANCELLED]
        assert not made.client.is_healthy
        assert not made.client.adapters._up
        made.restart(0, make_executor())
        assert sum(isinstance(event, TokenEvent) for each in streams[1] for event in each) == 4
        assert made.client.is_healthy


def test_a_request_under_which_too_many_replicas_are_lost_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.distributed.replicas.MAX_LOSSES", 1)
    gate = Gate(2)
    with replicated(1, make=lambda: make_executor(on_forward=gate)) as made:
        stream = made.client.submit(make_request(max_tokens=9))
        gate.is_reached.wait(PATIENCE)
        made.replicas[0].cut()  # in the middle of a step
        events = [event for each in stream for event in each]
        gate.is_open.set()
    assert isinstance(events[-1], Finished)
    assert isinstance(events[-1].error, ShardUnavailable)


class Fragile(ScriptedExecutor):
    """An executor whose device can be lost."""

    def __init__(self, **options: Any) -> None:
        super().__init__(vocab_size=32, num_blocks=512, block_size=4, **options)
        self.is_up = True
        self.on_change: Callable[[], None] = lambda: None


def test_what_a_replica_without_its_model_held_goes_on_elsewhere() -> None:
    """A replica whose shard was killed still runs, but cannot compute."""
    requests = some_requests(12, n=1, max_tokens=20, ignore_eos=True, stop=(), stop_token_ids=(), prompt_logprobs=None)
    gates = [Gate(9), Gate(9)]
    executors = [Fragile(on_forward=gate) for gate in gates]
    pending = executors[:]
    with replicated(make=lambda: pending.pop(0)) as made:
        streams = [made.client.submit(request) for request in requests]
        for gate in gates:
            gate.is_reached.wait(PATIENCE)
        executors[0].is_up = False
        for gate in gates:
            gate.is_open.set()
        events = {stream.request_id: [event for each in stream for event in each] for stream in streams}
        assert essence(events) == expected(requests)
        assert made.client.num_losses >= 1
        assert made.client.is_healthy


def test_what_is_not_understood_loses_the_replica_and_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = some_requests(6, n=1, max_tokens=20, ignore_eos=True, stop=(), stop_token_ids=(), prompt_logprobs=None)
    unpack, calls = replica_messages.unpack_event, count()

    def fail_once(message: WireEvent) -> Event:
        if next(calls) == 20:
            raise ValueError("a bug of ours")
        return unpack(message)

    monkeypatch.setattr(replica_messages, "unpack_event", fail_once)
    with replicated() as made:
        assert essence(read(made.client, requests)) == expected(requests)
        assert made.client.num_losses == 1


def test_what_no_frame_holds_breaks_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many long answers in one step need several frames."""
    requests = some_requests(40, n=1, max_tokens=8, stop=(), stop_token_ids=(), prompt_logprobs=None)
    wordy = make_request(tuple(range(30)) * 20, max_tokens=1, prompt_logprobs=5)
    with replicated(1) as made:
        monkeypatch.setattr(replica_messages, "MAX_FRAME_BYTES", 3_000)
        broken = made.client.submit(wordy)
        streams = [made.client.submit(request) for request in requests]
        with pytest.raises(ProtocolError, match="at most 3000"):
            list(broken)
        events = {stream.request_id: [event for each in stream for event in each] for stream in streams}
        assert made.client.num_losses == 0
    assert essence(events) == expected(requests)


def test_an_output_that_is_over_resumes_no_more() -> None:
    live = RoutedRequest(make_request(n=2, id="r"), EventStream("r", lambda request_id: None))
    assert live.open_outputs == [0]
    for event in (TokenEvent("r", 0, 5), TokenEvent("r", 1, 6), Finished("r", 0, FinishReason.STOP)):
        assert live.is_news(event)
    assert live.open_outputs == [1]


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (make_request((1, 99)), InvalidRequest),
        (make_request(max_tokens=100_000), ContextOverflow),
        (make_request(controller=object()), UnsupportedFeature),
        (make_request(stopping=(lambda tokens, num_prompt: None,)), UnsupportedFeature),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(request_: Request, error: type[Exception]) -> None:
    with replicated(1) as made, pytest.raises(error):
        made.client.submit(request_)


def test_what_only_the_engine_refuses_is_told() -> None:
    with replicated(1) as made:  # these engines compile no constraints
        (events,) = read(made.client, [make_request(controller=Regex("a+"))]).values()
    (event,) = events
    assert isinstance(event, Finished)
    assert isinstance(event.error, InvalidRequest)


def test_the_queue_is_bounded() -> None:
    gate = Gate(1)
    config = EngineConfig(max_waiting=2)
    with replicated(1, make=lambda: make_executor(max_num_seqs=1, on_forward=gate), config=config) as made:
        for _ in range(3):
            made.client.submit(make_request(max_tokens=2))
        with pytest.raises(Overloaded, match="3 requests run or wait already"):
            made.client.submit(make_request())
        gate.is_open.set()


def test_closing_ends_streams() -> None:
    gate = Gate(1)
    with replicated(1, make=lambda: make_executor(on_forward=gate)) as made:
        stream = made.client.submit(make_request())
        made.client.close()
        gate.is_open.set()
        with pytest.raises(EngineClosed):
            list(stream)
        with pytest.raises(EngineClosed):
            made.client.submit(make_request())


def test_statistics_are_sums() -> None:
    with replicated() as made:
        read(made.client, some_requests(6, prompt_logprobs=None))
        wanted = sum(replica.engine.statistics().num_sampled_tokens for replica in made.replicas)
        while made.client.statistics().num_sampled_tokens != wanted:
            time.sleep(0.01)  # until the next beats
        assert made.client.statistics().num_blocks == 2 * 512
        assert sum(made.client.statistics().finished.values()) >= 6


def test_replicas_that_do_not_come_are_told(tmp_path: Any) -> None:
    client = ReplicaSet([str(tmp_path / "none.sock")])
    with pytest.raises(ShardUnavailable, match=r"0 of 1 replicas started within 0\.1 s"):
        client.start(1, 0.1)
    client.close()
