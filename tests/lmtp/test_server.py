"""Tests of the server from a client's view, with a real engine and a scripted model: text, buffers, limits, and resumed
or cancelled streams."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridle.config import ModelConfig
from bridle.errors import ConnectionLost, UnsupportedModel
from bridle.lmtp.client import memory_pair
from bridle.lmtp.client.transports import MemoryLink
from bridle.lmtp.encoding import encode_answers
from bridle.lmtp.server import LmtpSettings
from bridle.lmtp.server.server import LOCAL_USER
from bridle.lmtp.server.stream_task import StreamTask
from bridle.serving import Admission, LoadedModel, ModelRegistry
from bridle.serving.models.model_loader import ModelManager
from bridle.serving.models.model_memory import Needs
from bridle.serving.models.model_slot import Slot
from bridle.serving.tenancy.loop_throttle import BURST, MAX_USELESS
from tests.http.controlled import lent
from tests.http.harness import leisurely_model, saying, scripted_model, tokenizer
from tests.lmtp.harness import Object, Setup, running
from tests.waiting import PATIENCE, until_async

STORY = "Zoë naïvely said: 日本 🙂, and left."


def tokens_of(found: list[Object]) -> list[int]:
    return [body["token"] for body in found]


def text_of(found: list[Object]) -> str:
    return "".join(body["text"] for body in found)


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


# -- text ----------------------------------------------------------------------------------------------------


async def test_text_in_text_out_whole_characters() -> None:
    async with running(scripted_model(next_token=saying(STORY))) as setup:
        found = await setup.connect().ask("GENERATE", prompt="Tell: ", max_tokens=200)
        assert text_of(found) == STORY
        assert all("\ufffd" not in body["text"] for body in found)
        assert tokens_of(found) == [*ids(STORY), tokenizer().eos_token_ids[0]]
        assert found[-1]["finish_reason"] == "stop"
        plain = await setup.connect().ask("GENERATE", prompt="Tell: ", max_tokens=200, text=False)
        assert tokens_of(plain) == tokens_of(found)
        assert not any("text" in body for body in plain)
        given = await setup.connect().ask("GENERATE", prompt=[5], text=True, max_tokens=200, stop=["naïvely"])
        assert text_of(given) == "Zoë "


async def test_text_is_scored_too() -> None:
    async with running() as setup:
        wire = setup.connect()
        by_text = await wire.ask("SCORE", prompt=[5, 6], scored=" hello")
        by_ids = await wire.ask("SCORE", prompt=[5, 6], scored=ids(" hello"))
        assert by_text == by_ids


# -- buffers -------------------------------------------------------------------------------------------------


async def test_a_prefix_by_name() -> None:
    async with running() as setup:
        wire = setup.connect()
        plain = await wire.ask("GENERATE", prompt=[9, 8, 7, 6], max_tokens=4)
        (named,) = await wire.ask("BUFFER", name="b", prompt=[9, 8, 7])
        assert (named["buffer"], named["num_tokens"]) == ("b", 3)
        assert await wire.ask("GENERATE", buffer="b", prompt=[6], max_tokens=4) == plain
        (longer,) = await wire.ask("BUFFER", name="c", parent="b", length=1, prompt=[8, 7, 6])
        assert longer["num_tokens"] == 4
        assert await wire.ask("GENERATE", buffer="c", max_tokens=4) == plain
        by_buffer = await wire.ask("SCORE", buffer="b", scored=[6, 5])
        assert by_buffer == await wire.ask("SCORE", prompt=[9, 8, 7], scored=[6, 5])


async def test_a_stream_is_continued_by_name_even_before_it_ends() -> None:
    async with running() as setup:
        wire = setup.connect()
        whole = await wire.ask("GENERATE", prompt=[9, 8], max_tokens=8)
        await wire.send("GENERATE", prompt=[9, 8], max_tokens=3, save="turn", stream_id=1)
        await wire.send("GENERATE", buffer="turn", max_tokens=5, save="turn", stream_id=2)
        await wire.send("GENERATE", buffer="turn", max_tokens=1, stream_id=3)
        rest = await wire.stream(2)
        assert tokens_of(rest) == tokens_of(whole)[3:]
        assert len(await wire.stream(3)) == 1


async def test_what_is_wrong_with_buffers() -> None:
    async with running(settings=LmtpSettings(max_buffers=2, max_buffer_tokens=10)) as setup:
        wire = setup.connect()
        (body,) = await wire.ask("GENERATE", buffer="nope", prompt=[1])
        assert "no buffer 'nope'" in body["error"] and body["param"] == "buffer"
        await wire.ask("BUFFER", name="a", prompt=[1] * 8)
        (body,) = await wire.ask("BUFFER", name="b", prompt=[1] * 3)
        assert "does not fit" in body["error"]
        await wire.ask("BUFFER", name="b", prompt=[1])
        (body,) = await wire.ask("BUFFER", name="c", prompt=[1])
        assert "2 buffers" in body["error"]
        for wrong in ([-1], [1 << 40], [5] * 600):
            (body,) = await wire.ask("BUFFER", name="b", prompt=wrong)
            assert body["code"] in ("invalid_request", "context_length_exceeded")
        await wire.ask("BUFFER", name="b", prompt=[1])
        await wire.ask("BUFFER", name="a", drop=True)
        (body,) = await wire.ask("BUFFER", name="c", prompt=[1] * 8)
        assert body["num_tokens"] == 8
        (body,) = await setup.connect().ask("GENERATE", buffer="b", prompt=[1])
        assert "no buffer" in body["error"]  # names are a connection's own
        await wire.ask("BUFFER", name="b", drop=True)
        await wire.send("GENERATE", prompt=[5] * 600, save="x", stream_id=1)
        await wire.send("GENERATE", buffer="x", stream_id=2)
        first, second = await wire.stream(1), await wire.stream(2)
        assert first[-1]["code"] == "context_length_exceeded"
        told = ("its stream failed", "no buffer 'x'")  # the second, if the first is over when the message comes
        assert any(words in second[-1]["error"] for words in told)


# -- ends ----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def stopping(num_steps: int) -> AsyncIterator[tuple[Setup, Callable[[int], Awaitable[None]]]]:
    """Yield a server whose device stops after `num_steps` steps, and a function that resumes it. The function waits for
    a number of cancelled requests, and then lets the device continue."""
    may_go_on, left = threading.Event(), iter(range(num_steps))
    model = scripted_model(on_forward=lambda plan: next(left, None) is None and may_go_on.wait(PATIENCE) and None)
    engine: Any = model.client
    cancel, cancelled = engine.cancel, set()

    def noting(request_id: str) -> None:
        cancel(request_id)
        cancelled.add(request_id)

    engine.cancel = noting

    async def go_on(num_cancelled: int) -> None:
        await until_async(lambda: len(cancelled) == num_cancelled, f"{num_cancelled} cancelled requests")
        may_go_on.set()

    async with running(model) as setup:
        try:
            yield setup, go_on
        finally:
            may_go_on.set()


async def test_cancel_frees_at_once() -> None:
    async with stopping(3) as (setup, go_on):
        wire = setup.connect()
        await wire.send("GENERATE", prompt=[5], max_tokens=400, logit_bias={"2": -1000}, stream_id=1)
        await wire.next()
        await wire.send("CANCEL", stream_id=1)
        await go_on(1)
        *_, last = await wire.stream(1)
        assert (last["code"], last.get("retryable", False)) == ("cancelled", False)
        await setup.settle()
        assert setup.model.client.statistics().num_sampled_tokens <= 3 + 1


async def test_a_lost_connection_frees_its_streams() -> None:
    async with stopping(8) as (setup, go_on):
        wire = setup.connect()
        for stream_id in range(5):
            await wire.send("GENERATE", prompt=[5], max_tokens=400, logit_bias={"2": -1000}, stream_id=stream_id)
        await wire.next()
        await wire.link.close()
        await go_on(5)
        await setup.settle()
        assert setup.server.num_connections == 0
        assert setup.model.client.statistics().num_sampled_tokens <= 5 * (8 + 1)


async def test_draining_ends_open_streams_in_an_error() -> None:
    async with running(leisurely_model()) as setup:
        old, new = setup.connect(), setup.connect()
        await new.hello()
        for wire in (old, new):
            await wire.send("GENERATE", prompt=[5], max_tokens=400, logit_bias={"2": -1000}, stream_id=1)
            await wire.next()
        setup.server.drain(5.0)
        for wire in (old, new):
            (refused,) = await wire.ask("GENERATE", prompt=[5], stream_id=2)
            assert (refused["code"], refused["retryable"]) == ("engine_closed", True)
        await setup.server.close()
        for wire in (old, new):
            *_, last = await wire.stream(1)
            assert (last["code"], last["retryable"]) == ("engine_closed", True)
        assert any(frame.startswith("EVENT") and "draining" in frame for frame in new.frames)
        assert not any(frame.startswith("EVENT") for frame in old.frames)


async def test_a_stopped_engine_is_told() -> None:
    async with running(leisurely_model()) as setup:
        wire = setup.connect()
        await wire.hello()
        await wire.send("GENERATE", prompt=[5], max_tokens=400, logit_bias={"2": -1000}, stream_id=1)
        while (await wire.next())[0] != "TOKEN":
            pass
        await asyncio.to_thread(setup.model.close)
        *_, last = await wire.stream(1)
        assert last["code"] == "engine_closed"
        (refused,) = await wire.ask("GENERATE", prompt=[5], stream_id=2)
        assert refused["code"] == "engine_closed"


# -- resuming ------------------------------------------------------------------------------------------------

KEYED = {"prompt": [5, 6], "max_tokens": 60, "temperature": 1.0, "key": "k", "logit_bias": {"2": -1000}}


def check_once(found: list[Object], num: int) -> None:
    assert [body["position"] for body in found] == list(range(num))
    assert found[-1]["finish_reason"] == "length"


async def test_a_stream_goes_on_after_its_connection_is_lost() -> None:
    async with running() as setup:
        wire = setup.connect()
        await wire.send("GENERATE", stream_id=1, **KEYED)
        seen = [(await wire.next())[1] for _ in range(5)]
        await wire.link.close()
        wire = setup.connect()
        await wire.send("RESUME", {"stream_id": "again", "key": "k", "position": 5})
        check_once([*seen, *await wire.stream("again")], 60)
        # The same request with the same key is the same stream, also when it is over.
        check_once(await wire.ask("GENERATE", stream_id=3, **KEYED), 60)
        assert setup.model.client.statistics().num_requests == 1


async def test_the_newest_connection_gets_the_stream() -> None:
    async with running() as setup:
        first, second = setup.connect(), setup.connect()
        await first.send("GENERATE", stream_id=1, **KEYED)
        await first.next()
        check_once(await second.ask("GENERATE", stream_id=9, **KEYED), 60)
        await first.send("MODEL_INFO", stream_id=2)
        assert (await first.stream(2))[0]["kind"] == "MSG"


async def test_what_cannot_be_resumed() -> None:
    async with running(settings=LmtpSettings(max_replay_size=80, max_detached=1)) as setup:
        wire = setup.connect()
        (body,) = await wire.ask("RESUME", key="k")
        assert body["code"] == "unknown_stream"
        (body,) = await wire.ask("GENERATE", **{**KEYED, "position": 3})
        assert body["code"] == "unknown_stream"
        await wire.ask("GENERATE", **KEYED)
        (body,) = await wire.ask("GENERATE", **{**KEYED, "prompt": [7]})
        assert (body["code"], body["param"]) == ("invalid_request", "key")
        (body,) = await wire.ask("RESUME", key="k", position=61)
        assert body["code"] == "unknown_stream"
        (body,) = await wire.ask("RESUME", key="k", position=3)
        first, end = map(int, re.findall(r"must be from (\d+) to (\d+)", body["error"])[0])
        assert 20 <= first < end == 60  # each is at least itself and one alternative
        assert len(await wire.ask("RESUME", key="k", position=first)) == 60 - first
        (body,) = await setup.connect("bob").ask("RESUME", key="k", position=first)
        assert body["code"] == "unknown_stream"  # keys are a user's own
        await wire.ask("GENERATE", **{**KEYED, "key": "other"})
        (body,) = await wire.ask("RESUME", key="k", position=60)
        assert body["code"] == "unknown_stream"  # only one is kept


async def test_a_stream_ends_when_nobody_comes_back() -> None:
    async with running(leisurely_model(), settings=LmtpSettings(resume_time=0.05)) as setup:
        wire = setup.connect()
        await wire.send("GENERATE", stream_id=1, **{**KEYED, "max_tokens": 500})
        await wire.next()
        await wire.link.close()
        await setup.settle()
        async with asyncio.timeout(PATIENCE):
            while True:
                *_, body = await setup.connect().ask("RESUME", key="k", position=1)
                if body.get("code") == "unknown_stream":
                    break


async def test_after_a_failure_that_may_pass_the_same_request_begins_anew() -> None:
    async with running(leisurely_model(), admission=Admission(max_requests=1)) as setup:
        wire = setup.connect()
        await wire.send("GENERATE", prompt=[5], max_tokens=400, logit_bias={"2": -1000}, stream_id=1)
        await wire.next()
        (body,) = await wire.ask("GENERATE", **{**KEYED, "stream_id": 2})
        assert (body["code"], body["position"]) == ("overloaded", 0)
        await wire.send("CANCEL", stream_id=1)
        await setup.settle()
        check_once(await wire.ask("GENERATE", **{**KEYED, "stream_id": 3}), 60)


async def test_a_cancelled_stream_is_forgotten() -> None:
    async with running(leisurely_model()) as setup:
        wire = setup.connect()
        await wire.send("GENERATE", stream_id=1, **{**KEYED, "max_tokens": 400})
        await wire.next()
        await wire.send("CANCEL", stream_id=1)
        assert (await wire.stream(1))[-1]["code"] == "cancelled"
        (body,) = await wire.ask("RESUME", key="k")
        assert body["code"] == "unknown_stream"
        await setup.settle()


# -- limits and company --------------------------------------------------------------------------------------


async def test_a_full_server_says_when_to_come_back() -> None:
    async with running(leisurely_model(), admission=Admission(max_requests=1)) as setup:
        wire = setup.connect()
        await wire.send("GENERATE", prompt=[5], max_tokens=400, logit_bias={"2": -1000}, stream_id=1)
        await wire.next()
        (body,) = await wire.ask("GENERATE", prompt=[5], stream_id=2)
        assert (body["code"], body["retryable"]) == ("overloaded", True)
        assert body["retry_after"] >= 1


@pytest.fixture(scope="module")
def shared_model() -> Iterator[LoadedModel]:
    model = scripted_model()
    yield model
    model.close()


jobs = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(3, 200), min_size=1, max_size=40),
        "max_tokens": st.integers(1, 12),
        "temperature": st.sampled_from([0.0, 0.8]),
        "top_logprobs": st.integers(1, 5),
        "seed": st.integers(0, 9),
    },
    optional={"logit_bias": st.sampled_from([{"7": 100, "9": 100}, {"2": -100}]), "top_p": st.just(0.9)},
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(todo=st.lists(st.tuples(st.integers(0, 2), jobs), min_size=1, max_size=12))
def test_streams_share_a_batch_and_nothing_else(
    shared_model: LoadedModel, todo: list[tuple[int, dict[str, Any]]]
) -> None:
    """Any interleaving keeps the order within each stream, and each stream gets the output that it would get alone."""

    async def run() -> None:
        async with running(lent(shared_model)) as setup:
            alone = [await setup.connect().ask("GENERATE", **job) for _, job in todo]
            wires = [setup.connect() for _ in range(3)]
            for number, (where, job) in enumerate(todo):
                await wires[where].send("GENERATE", stream_id=number, **job)
            for number, wire in enumerate(wires):
                found: dict[int, list[Object]] = {each: [] for each, (where, _) in enumerate(todo) if where == number}
                while not all(bodies and bodies[-1]["finish_reason"] for bodies in found.values()):
                    kind, body = await wire.next()
                    assert kind == "TOKEN"
                    found[body["stream_id"]].append(body)
                for each, bodies in found.items():
                    assert [{**body, "stream_id": 1} for body in bodies] == alone[each]
            await setup.settle()

    asyncio.run(run())


async def test_prefixes_are_computed_once() -> None:
    async with running() as setup:
        prompt = list(range(3, 103))
        await setup.connect().ask("GENERATE", prompt=prompt, max_tokens=2)
        before = setup.model.client.statistics().num_computed_tokens
        await setup.connect().ask("GENERATE", prompt=[*prompt, 5, 6], max_tokens=2)
        await setup.connect().ask("SCORE", prompt=prompt, scored=[7, 8])
        assert setup.model.client.statistics().num_computed_tokens - before < 30


async def test_half_a_large_vocabulary_in_a_mask() -> None:
    """The server accepts a message of one megabyte, although the model lacks most of its token ids."""
    async with running() as setup:
        wire = setup.connect()
        bias = {str(token): 100 for token in range(1, 128_000, 2)}
        await wire.send("GENERATE", prompt=[5], max_tokens=2, logit_bias=bias, stream_id=1)
        await wire.send("MODEL_INFO", stream_id=2)
        found = await wire.stream(1)
        assert [body["token"] % 2 for body in found] == [1] * len(found)


async def test_a_client_that_does_not_read_is_not_read_from() -> None:
    async with running() as setup:
        ours, theirs = memory_pair(4)
        task = asyncio.create_task(setup.server.serve(theirs, LOCAL_USER))
        num_sent = 0
        try:
            async with asyncio.timeout(0.2):
                while True:
                    await ours.send("PING")
                    num_sent += 1
        except TimeoutError:
            pass
        assert num_sent < 5_000
        await ours.close()
        await task


async def test_a_constraint_shapes_the_text() -> None:
    async with running() as setup:
        found = await setup.connect().ask(
            "GENERATE", prompt=[5], text=True, max_tokens=9, constraint={"regex": "(yes|no)!"}
        )
        assert text_of(found) in ("yes!", "no!")
        assert found[-1]["finish_reason"] == "stop"
        (body,) = await setup.connect().ask("GENERATE", prompt=[5], constraint={"regex": "("})
        assert body["code"] == "invalid_request"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"controller": "x"}, "controller"),
        ({"controller_arg": "x"}, "controller_arg"),
        ({"adapter": "x"}, "adapter"),
        ({"stop": 5}, "stop"),
        ({"top_p": 2}, "top_p"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"logit_bias": {"5": "nan"}}, "logit_bias"),
        ({"rewind": "mark"}, "rewind"),
    ],
)
async def test_fields_are_checked(fields: dict[str, Any], param: str) -> None:
    async with running() as setup:
        (body,) = await setup.connect().ask("GENERATE", prompt=[5], **fields)
        assert body["param"] == param


async def test_notices_for_those_who_know_them() -> None:
    go_on = threading.Event()
    async with running(scripted_model(on_forward=lambda plan: go_on.wait(PATIENCE) and None)) as setup:
        try:
            wire, old = setup.connect(), setup.connect()
            wire.tells_waiting = True
            await wire.hello()
            for each in (old, wire):
                await each.send("GENERATE", prompt=[5], max_tokens=3, logit_bias={"2": -1000}, stream_id=1)
            kind, notice = await wire.next()
            assert (kind, notice["event"], notice["stream_id"]) == ("EVENT", "queued", 1)
        finally:
            go_on.set()
        assert (await wire.stream(1))[-1]["usage"]["completion_tokens"] == 3
        assert all("usage" not in body and "event" not in body for body in await old.stream(1))


class Loader:
    """A loader of scripted models, which can be slow."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def measure(self, config: ModelConfig, name: str) -> Needs:
        return Needs(0)

    def make_room(self, config: ModelConfig) -> ModelConfig:
        return config

    def load(self, config: ModelConfig, name: str, progress: Any) -> LoadedModel:
        assert self.go_on.wait(PATIENCE)
        if config.model == "broken":
            raise UnsupportedModel("it is broken")
        return scripted_model(name=name)


async def test_a_model_is_loaded_when_it_is_asked_for() -> None:
    loader = Loader()
    registry = ModelRegistry(keeper=ModelManager(loader))
    for name in ("late", "broken"):
        registry.add_slot(Slot(name, ModelConfig(name)))
    async with running() as setup:
        setup.server.home.host.registry = registry  # type: ignore[misc]
        new, old = setup.connect(), setup.connect()
        await new.send("MODEL_INFO", {"model": "late", "stream_id": 1, "data": {"lmtp": {"version": 1}}})
        (info,) = await new.stream(1)
        assert info["model_info"] == "<unavailable>"
        assert info["lmtp"]["resume"] is True
        for wire in (new, old):
            await wire.send("GENERATE", {"model": "late", "stream_id": 2, "prompt": [5], "max_tokens": 2})
        kind, notice = await new.next()
        assert (kind, notice["event"], notice["model"]) == ("EVENT", "loading", "late")
        loader.go_on.set()
        found = await new.stream(2)
        assert next(body["event"] for body in found if "event" in body) == "loaded"
        assert found[-1]["finish_reason"] == "length"
        assert [body["finish_reason"] for body in await old.stream(2)] == [None, "length"]
        await new.send("GENERATE", {"model": "broken", "stream_id": 3, "prompt": [5]})
        assert (await new.stream(3))[-1]["code"] == "model_unavailable"
        await new.send("GENERATE", {"model": "late", "stream_id": 4, "prompt": [5], "max_tokens": 1})
        assert len(await new.stream(4)) == 1  # the failure of one is nothing to the other
    registry.close()


def test_what_there_is_no_place_for_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    work = StreamTask.run

    async def counted(self: StreamTask) -> None:
        begun.append(str(self.request.stream_id))
        await work(self)

    monkeypatch.setattr(StreamTask, "run", counted)

    async def main() -> None:
        async with running(leisurely_model(), admission=Admission(max_requests=1)) as setup:
            wire = setup.connect()
            await wire.send("GENERATE", prompt=[5], max_tokens=400, logit_bias={"2": -1000}, stream_id=1)
            await wire.next()
            for number in range(2, 9):
                await wire.send("GENERATE", **{**KEYED, "stream_id": number, "key": f"k{number}", "save": "b"})
                assert (await wire.stream(number))[-1]["code"] == "overloaded"
            assert begun == ["1"] and setup.server.num_kept == 0

    asyncio.run(main())


def test_users_are_heard_in_turn_whatever_number_of_connections_they_have() -> None:
    """The server has used its share of the event loop, so it reads no further message before the test grants a turn."""

    async def settled() -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    async def main() -> None:
        async with running() as setup:
            turns = setup.server.home.host.turns
            wires = [setup.connect() for _ in range(20)]
            for wire in wires:
                await wire.hello()
            await settled()  # all are heard that were slow to say so, and a slow machine has spent its share on it
            await until_async(lambda: not turns.num_waiting, "nobody waiting")
            await settled()
            turns.charge(3_600.0)
            for _ in range(3):  # what waits is with the client
                for wire in wires:
                    await wire.send("MODEL_INFO", stream_id=1)
                await asyncio.sleep(0)
            for wire in wires:  # each was heard once, having waited for it since its last message
                await wire.next()
            await settled()
            assert turns.num_waiting == len(wires)

    asyncio.run(main())


def test_a_flood_of_messages_that_are_no_requests_ends_in_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str] = []

    async def close(self: MemoryLink, reason: str = "", real: Any = MemoryLink.close) -> None:
        reasons.append(reason)
        await real(self, reason)

    monkeypatch.setattr(MemoryLink, "close", close)

    async def main() -> None:
        async with running(leisurely_model()) as setup:
            wire, other = setup.connect(), setup.connect()
            await wire.send("GENERATE", prompt=[5], max_tokens=400, logit_bias={"2": -1000}, stream_id=1)
            await wire.next()
            for _ in range(2 * MAX_USELESS):  # in no time is so much allowed again
                await wire.link.send("NONE")
            said = "too many messages that are no requests: at most 1000 at once, and then 10 per second"
            told: list[Object] = []
            with contextlib.suppress(ConnectionLost):
                while True:
                    told.append((await wire.next())[1])
            ends = [each for each in told if said in each.get("error", "")]
            assert [each["stream_id"] for each in ends] == [None, 1] and reasons == [said]
            assert sum("'NONE' is not a message" in each.get("error", "") for each in told) > MAX_USELESS
            assert len(await other.ask("GENERATE", prompt=[5], max_tokens=3)) == 3
            await setup.settle()

    asyncio.run(main())


def test_immediate_answers_are_charged_and_tokens_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's clock advances one second for each write of answers, and at no other time."""
    seconds = 0.0

    def written(answers: Any) -> Any:
        nonlocal seconds
        seconds += 1.0
        return encode_answers(answers)

    charged: list[float] = []
    monkeypatch.setattr("bridle.lmtp.server.connection.encode_answers", written)
    monkeypatch.setattr("bridle.lmtp.server.connection.time", SimpleNamespace(monotonic=lambda: seconds))

    async def main() -> None:
        async with running() as setup:
            monkeypatch.setattr(setup.server.home.host.turns, "charge", charged.append)
            wire = setup.connect()
            assert len(await wire.ask("GENERATE", prompt=[5], max_tokens=20)) == 20
            assert sum(charged) == 0.0
            await wire.hello()
            await wire.link.send("NONE")
            await wire.next()
            await wire.ask("GENERATE", prompt=[5], max_tokens=1)  # what was charged before is known now
            assert sum(charged) == pytest.approx(2 * BURST)

    asyncio.run(main())
