"""Tests of steering across processes, and after the loss of a replica."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import msgspec
import pytest

from bridle.aici.client import WasmController
from bridle.aici.protocol import Auth
from bridle.config import EngineConfig
from bridle.controllers import Controller
from bridle.controllers.beams import BeamSearch
from bridle.controllers.composition import Composed, Demand, compose
from bridle.controllers.reasoning_gate import CompiledGrammar, ReasoningThenGrammar, compile_grammar
from bridle.controllers.thinking import ThinkingBudget
from bridle.distributed.codec.controllers import form_to_compile, pack_controller, unpack_controller
from bridle.distributed.live_request import RoutedRequest
from bridle.distributed.replica_messages import HEADER, Submit, frame, pack_request, read_by_replica, unpack_request
from bridle.distributed.replica_server import ReplicaServer
from bridle.distributed.replicas import ReplicaSet
from bridle.engine import EngineClient
from bridle.engine.client import EventStream
from bridle.errors import ControllerError, InternalError, InvalidRequest, ProtocolError, UnsupportedFeature
from bridle.outputs import Event, Finished, Log, Stored, TokenEvent, Traced
from bridle.serving.policies import PolicyContext, read_policies
from bridle.structured_output import Choice, Constraint, JsonSchema, Regex, vocabulary_of
from bridle.traces import ChunkRecord, TokenRecord
from tests.engine.support import make_request
from tests.fakes.compile_children import thrifty_pool
from tests.http.harness import scripted_model, tokenizer

WASM = WasmController("a" * 64, '{"x": "é"}', Auth("eva", True))


@pytest.mark.parametrize(
    "controller",
    [
        None,
        Regex("a+"),
        Choice(["yes", "no"]),
        JsonSchema({"type": "object"}),
        WASM,
        WasmController("tag"),
        compose(WASM, Regex("a+"), WasmController("tag")),
    ],
)
def test_constraints_and_wasm_controllers_travel(controller: object) -> None:
    request = make_request(controller=controller, metadata={"traceparent": "00"})
    message = read_by_replica(frame(pack_request(request))[HEADER.size :])
    assert isinstance(message, Submit)
    assert unpack_request(message) == request


def test_free_parts_travel_with_what_their_grammar_comes_of() -> None:
    pool = thrifty_pool(lambda: vocabulary_of(tokenizer(), tokenizer().vocab_size, tokenizer().eos_token_ids))
    grammar = asyncio.run(compile_grammar(pool, Regex("[0-9]+")))
    part = ReasoningThenGrammar(2, 1, 30, (5, 2), (6,), grammar, False)
    plain = pack_controller(part)
    assert form_to_compile(plain) == Regex("[0-9]+")
    again = unpack_controller(plain, grammar)
    assert again == part
    crew = compose(WASM, part)
    assert form_to_compile(pack_controller(crew)) == Regex("[0-9]+")
    assert unpack_controller(pack_controller(crew), grammar) == crew
    assert form_to_compile(pack_controller(ReasoningThenGrammar(2))) is None
    assert unpack_controller(pack_controller(ReasoningThenGrammar(2))) == ReasoningThenGrammar(2)
    pool.shutdown()


def test_a_budget_of_thoughts_travels_with_its_sentence() -> None:
    for budget in (ThinkingBudget(1, 2, 30), ThinkingBudget(1, 2, 30, (7, 8))):
        assert unpack_controller(pack_controller(budget)) == budget
    with pytest.raises(ProtocolError, match="unknown kind"):
        unpack_controller({"thinking": [1, 2, 30, "x"]})


async def test_a_replica_compiles_what_a_free_part_needs(tmp_path: Path) -> None:
    """A few free tokens are followed by digits, as in one process. An invalid grammar ends only its request."""
    model = scripted_model()
    assert model.constraints is not None
    grammar = await compile_grammar(model.constraints, Regex("[0-9]{4}"))
    ended, listens = asyncio.Event(), asyncio.Event()
    make_grammar = partial(compile_grammar, model.constraints)
    server = ReplicaServer(model.client, EngineConfig(), tmp_path / "r.sock", make_grammar)
    serving = asyncio.create_task(server.run(ended, listens.set))
    await listens.wait()
    replicas = ReplicaSet([str(tmp_path / "r.sock")])
    await asyncio.to_thread(replicas.start, 1, 60)

    async def run(client: EngineClient, then: CompiledGrammar) -> list[Event]:
        part = ReasoningThenGrammar(end=3, budget=2, closing=(3,), then=then, may_stop=False)
        stream = client.submit(make_request((5, 6, 7), controller=part, max_tokens=30, seed=1))
        return [event async for events in stream for event in events]

    there, here = await run(replicas, grammar), await run(model.client, grammar)
    assert [e.token for e in there if isinstance(e, TokenEvent)] == [e.token for e in here if isinstance(e, TokenEvent)]
    broken = CompiledGrammar(grammar.matcher, grammar.vocabulary, JsonSchema({"type": "nonsense"}))
    (end,) = await run(replicas, broken)
    assert isinstance(end, Finished) and isinstance(end.error, InvalidRequest)
    await asyncio.to_thread(replicas.close)
    ended.set()
    await serving
    model.close()


class Named(Controller):
    """A controller class that an operator registers."""

    def __init__(self, words: dict[str, int]) -> None:
        self.words = words


def test_a_class_of_a_policy_is_made_again_where_it_can_be() -> None:
    place, argument = f"{__name__}:Named", {"words": 3}
    table = {"name": "mine", "kind": "python", "class": place, "argument": argument, "on_failure": "skip"}
    model = scripted_model()
    applied = read_policies({"policy": [table]}).select(PolicyContext("scripted"), model)
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(pack_controller(applied.steer(Regex("a+")))))
    again = unpack_controller(plain)
    model.close()
    assert isinstance(again, Composed) and again.demands == (Demand("mine", "skip"),)
    mine, own = again.parts
    assert isinstance(mine, Named) and mine.words == argument and own == Regex("a+")
    absent = unpack_controller({"demanded": ["nowhere_at_all:Nothing", None]})
    assert isinstance(absent, Controller)
    with pytest.raises(ControllerError, match="nowhere_at_all"):
        absent.start((1,))


def test_objects_of_a_process_do_not() -> None:
    with pytest.raises(UnsupportedFeature, match="a Controller cannot be sent to a replica"):
        pack_controller(Controller())


@pytest.mark.parametrize("plain", [{}, {"magic": 1}, {"wasm": {"module": 7}}, {"wasm": 3}])
def test_what_is_no_controller_is_refused(plain: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        unpack_controller(plain)


def token(number: int) -> TokenEvent:
    return TokenEvent("r", 0, number, "x")


def live_with(controller: object, *events: Event) -> RoutedRequest:
    live = RoutedRequest(make_request(controller=controller, id="r"), EventStream("r", print))
    for event in events:
        assert live.is_news(event)
    live.begin_again()
    return live


def test_what_a_controller_said_is_not_said_twice() -> None:
    stored = Stored("r", 0, "name", b"1")
    live = live_with(WASM, Log("r", 0, "hello "), token(1), stored, Log("r", 0, "you\n"), token(2))
    again = [Log("r", 0, "hello you\n"), token(1), token(2), stored, Log("r", 0, "bye"), token(3), stored]
    assert [live.is_news(event) for event in again] == [False, False, False, False, True, True, True]


@pytest.mark.parametrize(
    ("controller", "error"), [(WASM, ControllerError), (Regex("a+"), InternalError), (None, InternalError)]
)
def test_one_that_does_not_repeat_itself_cannot_go_on(controller: Constraint | None, error: type[Exception]) -> None:
    live = live_with(controller, token(1), token(2))
    if controller is None:
        live.request = make_request(id="r", n=2)
    assert not live.is_news(token(1))
    with pytest.raises(error, match="cannot continue"):
        live.is_news(token(7))


def test_a_beam_search_goes_to_a_replica() -> None:
    search = BeamSearch(4, 20, (2, 7), 0.5, "never")
    assert unpack_controller(pack_controller(search)) == search
    with pytest.raises(ProtocolError, match="got an invalid beam search"):
        unpack_controller({"beams": {"width": 0, "max_tokens": 3}})


def test_records_of_a_second_beginning_are_told_from_where_the_first_one_got_to() -> None:
    live = RoutedRequest(make_request(n=2, trace=True, id="r"), EventStream("r", print))

    def traced(at: int, step: int) -> Event:
        return Traced("r", 0, TokenRecord(0, step, at, 7))

    first = [traced(0, 1), TokenEvent("r", 0, 7), traced(1, 2), TokenEvent("r", 0, 8)]
    assert all(map(live.is_news, first))
    live.begin_again()
    again = [
        Traced("r", 0, ChunkRecord(0, 5, 0, 3)),
        traced(0, 5),
        TokenEvent("r", 0, 7),
        traced(1, 6),
        TokenEvent("r", 0, 8),
    ]
    assert not any(map(live.is_news, again))
    assert all(map(live.is_news, [traced(2, 7), TokenEvent("r", 0, 9)]))


def test_records_of_an_output_that_goes_on_are_all_told() -> None:
    live = RoutedRequest(make_request(trace=True, id="r"), EventStream("r", print))
    events = [Traced("r", 0, TokenRecord(0, 1, 0, 7)), TokenEvent("r", 0, 7)]
    assert all(map(live.is_news, events))
    live.begin_again()
    assert all(map(live.is_news, [Traced("r", 0, TokenRecord(0, 1, 1, 8)), TokenEvent("r", 0, 8)]))
    assert live.tokens == (7, 8)
