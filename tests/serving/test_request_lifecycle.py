"""Tests of the life of a request: its resources are freed at any end, and its record has its cost."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from typing import Any

import pytest

from bridle.config import EngineConfig
from bridle.controllers.beams import BeamSearch
from bridle.engine import StepPlan
from bridle.errors import BridleError, EngineClosed, InvalidRequest, Overloaded, UnknownModel
from bridle.outputs import Event
from bridle.sampling import SamplingParams
from bridle.serving import Admission, ModelRegistry, new_request_id
from bridle.serving.lifecycle.generation import SubRequest
from bridle.serving.lifecycle.request_lifecycle import AppState, RequestLifecycle
from bridle.serving.lifecycle.request_record import RequestRecord
from bridle.serving.requests.request_builder import EMBEDDING
from bridle.serving.requests.steering import Steering
from bridle.serving.tenancy.keys import Identity
from tests.http.harness import leisurely_model, saying, scripted_model
from tests.serving.loaders import FakeLoader, registry_of
from tests.waiting import PATIENCE

SHORT = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
ANN = Identity("ann", False)


@pytest.fixture(scope="module")
def host() -> Any:
    registry = ModelRegistry([scripted_model(next_token=saying("abc"), embedding_size=4)])
    yield AppState(registry, Admission(max_requests=4), max_prompts=8, max_choices=8)
    registry.close()


def begin(host: AppState, held: ExitStack) -> RequestLifecycle:
    return RequestLifecycle(host, RequestRecord(id=new_request_id(), identity=ANN), held)


async def test_what_a_request_holds_is_given_back(host: AppState) -> None:
    with ExitStack() as held:
        serving = begin(host, held)
        await serving.acquire_model(None)
        (tokens,) = await serving.tokens(["x"])
        generation = await serving.prepare([tokens], SHORT)
        assert host.admission.num_requests == 1 and host.admission.num_tokens == len(tokens)
        assert host.live == {serving.story.id: serving.story} and serving.story.model == "scripted"
        await generation.run()
        story = serving.story
        assert story.usage is not None and story.usage.completion_tokens == 4 and story.finish == ["length"]
        assert generation.parts[0].request.tenant == "ann" and serving.ticket.num_output == 4
    assert (host.admission.num_requests, host.admission.num_tokens, host.live) == (0, 0, {})


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"name": "nobody"}, UnknownModel),
        ({"name": None, "num_prompts": 9}, InvalidRequest),
        ({"name": None, "n": 9}, InvalidRequest),
        ({"name": None, "num_prompts": 5}, InvalidRequest),
        ({"name": None, "priority": -101}, InvalidRequest),
        ({"name": None, "priority": -1}, InvalidRequest),
        ({"name": None, "deadline": -1.0}, InvalidRequest),
        ({"name": None, "adapter": "nobody"}, InvalidRequest),
    ],
)
async def test_a_refusal_leaves_nothing(host: AppState, asked: Any, error: type[BridleError]) -> None:
    with ExitStack() as held, pytest.raises(error):
        await begin(host, held).acquire_model(**asked)
    assert (host.admission.num_requests, host.live) == (0, {})


async def test_a_full_house_refuses_before_it_waits(host: AppState) -> None:
    with ExitStack() as held, ExitStack() as other:
        await begin(host, held).acquire_model(None, num_prompts=4)
        with pytest.raises(Overloaded):
            await begin(host, other).acquire_model(None)
        assert (await begin(host, other).acquire_model_for_metadata(None)).name == "scripted"  # takes no place
    host.is_draining = True
    with ExitStack() as held, pytest.raises(EngineClosed):
        await begin(host, held).acquire_model(None)
    host.is_draining = False


async def test_what_was_broken_off_is_counted() -> None:
    """A stream consumer that stops early ends the request. The generated tokens are returned and charged."""
    host, seen = AppState(ModelRegistry([leisurely_model()]), Admission()), 0

    async def sink(part: SubRequest, events: list[Event]) -> bool:
        nonlocal seen
        seen = len(part.outputs[0].token_ids)
        return seen >= 2

    with ExitStack() as held:
        serving = begin(host, held)
        await serving.acquire_model(None)
        generation = await serving.prepare(await serving.tokens(["x"]), SHORT.with_(max_tokens=300))
        await generation.run(sink)
        assert serving.story.finish == ["cancelled"]
        assert serving.story.usage is not None and serving.story.usage.completion_tokens == seen
        assert serving.ticket.num_output == seen
    host.registry.close()


async def test_first_events_come_again(host: AppState) -> None:
    with ExitStack() as held:
        serving = begin(host, held)
        await serving.acquire_model(None)
        generation = await serving.prepare(await serving.tokens(["x"]), SHORT)
        assert await generation.begin()
        told: list[Event] = []

        async def sink(part: SubRequest, events: list[Event]) -> None:
            told.extend(events)

        await generation.run(sink)
        assert generation.parts[0].outputs[0].text == "".join(getattr(event, "text", "") for event in told)
        assert serving.story.num_tokens == 4


async def test_few_run_at_once(host: AppState) -> None:
    client = host.registry.default.client
    most = 0

    async def sink(part: SubRequest, events: list[Event]) -> None:
        nonlocal most
        now = client.statistics()
        most = max(most, now.num_running + now.num_waiting)

    with ExitStack() as held:
        serving = begin(host, held)
        await serving.acquire_model(None, num_prompts=2)
        tokens = await serving.tokens([f"text {number}" for number in range(6)])
        generation = await serving.prepare(tokens, EMBEDDING, detokenize=False, embeds=True, at_once=2)
        await generation.run(sink)
        assert all(part.collector.output.embedding is not None for part in generation.parts)
    assert most <= 2


async def test_a_cancelled_call_lets_go() -> None:
    host, begun = AppState(ModelRegistry([leisurely_model()]), Admission()), asyncio.Event()

    async def sink(part: SubRequest, events: list[Event]) -> None:
        begun.set()
        await asyncio.Event().wait()

    with ExitStack() as held:
        serving = begin(host, held)
        await serving.acquire_model(None)
        generation = await serving.prepare(await serving.tokens(["x"]), SHORT.with_(max_tokens=300))
        task = asyncio.create_task(generation.run(sink))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert serving.story.finish == ["cancelled"]
    assert host.admission.num_requests == 0
    host.registry.close()


async def test_a_call_cancelled_during_its_prompt_tells_how_far_it_came() -> None:
    """The engine is stopped in its third step, when two chunks of the prompt are computed and 32 tokens were cached."""
    held_up, go, num_steps = asyncio.Event(), threading.Event(), 0
    loop = asyncio.get_running_loop()

    def on_forward(plan: StepPlan) -> None:
        nonlocal num_steps
        num_steps += len(plan.rows) and plan.rows[0].num_prompt == 200
        if num_steps == 3:
            loop.call_soon_threadsafe(held_up.set)
            assert go.wait(PATIENCE)

    model = scripted_model(config=EngineConfig(max_batch_prefill_tokens=32), on_forward=on_forward)
    host = AppState(ModelRegistry([model]), Admission())
    with ExitStack() as held:
        serving = begin(host, held)
        await serving.acquire_model(None)
        await (await serving.prepare([(1,) * 40], SHORT)).run()
    with ExitStack() as held:
        serving = begin(host, held)
        await serving.acquire_model(None)
        generation = await serving.prepare([(1,) * 36 + (2,) * 164], SHORT)
        story = serving.story
        assert (story.state, story.prompt_counts) == ("coming in", (0, 0))
        task = asyncio.create_task(generation.run())
        await held_up.wait()
        assert (story.state, story.prompt_counts) == ("prompt", (64, 32))
        task.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        told = story.fields()
        assert (told["prompt"], told["cached"], told["computed"], told["completion"]) == (200, 32, 64, 0)
        assert told["finish"] == "cancelled"
    host.registry.close()


async def test_a_call_that_ends_tells_no_progress(host: AppState) -> None:
    with ExitStack() as held:
        serving = begin(host, held)
        await serving.acquire_model(None)
        await (await serving.prepare(await serving.tokens(["x"]), SHORT)).run()
        computed, cached = serving.story.prompt_counts
        assert computed + cached == serving.story.num_prompt
        assert "computed" not in serving.story.fields()


async def test_a_beam_search_counts_for_all_its_beams(host: AppState) -> None:
    """The beams are not separate requests, but they count as that number of requests."""
    new = AppState(host.registry, Admission(max_requests=4))  # no output was short yet, which would bound the guess
    guesses = []
    for width in (1, 2):
        with ExitStack() as held:
            serving = begin(new, held)
            await serving.acquire_model(None)
            steering = Steering(BeamSearch(width, 1))
            await serving.prepare(await serving.tokens(["x"]), SHORT.with_(max_tokens=1), steering)
            guesses.append(serving.ticket.places[0].guess)
    assert guesses == [1, 2]


async def test_the_room_for_prompts_follows_the_models_that_are_loaded() -> None:
    """A model with a long context adds room for prompts while it is loaded, and removes this room when it is
    unloaded."""
    loader = FakeLoader({"a": 10, "b": 10})
    host = AppState(registry_of(loader), Admission(max_tokens=8))
    assert host.admission.max_tokens == 8
    for name in ("a", "b"):
        with ExitStack() as held:
            longest = (await begin(host, held).acquire_model(name)).max_sequence_tokens
        assert host.admission.max_tokens == longest > 8
        await host.registry.unload(name)
        assert host.admission.max_tokens == 8
    host.registry.close()
