"""Fields that every API has reach the engine from each API in the same way. These fields are sampling values that a
checkpoint recommends, the token limit, priority and deadline. All APIs also count draft tokens in the same way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from bridle import LLM
from bridle.cli.limit_options import LimitOptions
from bridle.cli.options import SamplingOptions
from bridle.engine.request import Request
from bridle.errors import InvalidRequest
from bridle.http import HttpSettings, ServeSettings, create_app
from bridle.http.aici.shapes import RunUsage
from bridle.lmtp.decoding import decode_request
from bridle.lmtp.encoding import encode_request
from bridle.lmtp.messages import Generate, Score
from bridle.lmtp.server.requests import generation_of
from bridle.outputs import Finished, FinishReason, Usage
from bridle.serving import LoadedModel, ModelRegistry
from bridle.serving.lifecycle.request_lifecycle import AppState, RequestLifecycle
from bridle.serving.lifecycle.request_record import RequestRecord
from bridle.serving.tenancy.admission import Admission
from bridle.serving.tenancy.keys import KeyStore
from bridle.serving.tenancy.rate_limit import UserLimits
from tests.http.conftest import REPLY
from tests.http.harness import (
    RECOMMENDED,
    Heard,
    local_client,
    overdue_model,
    recommended,
    saying,
    scripted_model,
    served,
)
from tests.lmtp.harness import running
from tests.serving.fakes import fake_model
from tests.waiting import PATIENCE

CHAT = [{"role": "user", "content": "a"}]
LIMIT, CONTEXT = 9, 512


@dataclass(frozen=True)
class Api:
    """One HTTP API: a body without options, and the place of options in it."""

    path: str
    body: dict[str, Any]
    limit: str = "max_tokens"
    own_limit: int | None = None  # of a request that names none
    within: str = ""
    counts: dict[str, Any] = field(default_factory=dict)  # what makes the answer tell of draft tokens

    def with_(self, **options: Any) -> dict[str, Any]:
        if not self.within:
            return self.body | options
        return self.body | {self.within: self.body.get(self.within, {}) | options}


DRAFTED: dict[str, Any] = {"speculate": 4, "prediction": REPLY}
CHAT_DRAFTED = DRAFTED | {"prediction": {"type": "content", "content": REPLY}}
NATIVE = {"limit": "max_new_tokens", "within": "parameters"}
APIS = {
    "completions": Api("/v1/completions", {"prompt": "a"}, own_limit=16, counts=DRAFTED | {"max_tokens": 40}),
    "chat": Api("/v1/chat/completions", {"messages": CHAT}, counts=CHAT_DRAFTED),
    "chat, newer limit": Api("/v1/chat/completions", {"messages": CHAT}, "max_completion_tokens"),
    "responses": Api("/v1/responses", {"input": "a"}, "max_output_tokens", counts=DRAFTED),
    "messages": Api("/v1/messages", {"messages": CHAT, "max_tokens": 40}, own_limit=40, counts=DRAFTED),
    "run": Api("/v1/run", {"controller": "none", "controller_arg": "a"}),
    "tgi": Api("/generate", {"inputs": "a"}, **NATIVE, counts=DRAFTED | {"details": True}),
    "tgi stream": Api("/generate_stream", {"inputs": "a"}, **NATIVE),
    "tgi root": Api("/", {"inputs": "a"}, **NATIVE),
    "invocations": Api("/invocations", {"inputs": "a"}, **NATIVE),
    "invocations chat": Api("/invocations", {"messages": CHAT}),
    "sglang": Api(
        "/generate", {"text": "a"}, "max_new_tokens", 128, "sampling_params", DRAFTED | {"max_new_tokens": 40}
    ),
}
TERMS = [name for name in APIS if name not in ("sglang", "chat, newer limit")]
every_api = pytest.mark.parametrize("api", APIS.values(), ids=APIS)
every_term = pytest.mark.parametrize("api", [APIS[name] for name in TERMS], ids=TERMS)


@dataclass(frozen=True)
class Front:
    """A server in this process, and the requests that reach its engine."""

    model: LoadedModel
    client: TestClient
    heard: Heard

    def ask(self, api: Api, **options: Any) -> Request:
        answer = self.client.post(api.path, json=api.with_(**options))
        assert answer.status_code == 200, answer.text
        return self.heard.requests[-1]


def front(model: LoadedModel, **settings: Any) -> Iterator[Front]:
    heard = Heard(model)
    with local_client(model, HttpSettings(**settings)) as client:
        yield Front(model, client, heard)


@pytest.fixture(scope="module")
def recommending() -> Iterator[Front]:
    """Yield a server whose model's checkpoint recommends sampling values."""
    yield from front(replace(scripted_model(), defaults=dict(RECOMMENDED)))


@pytest.fixture(scope="module")
def limiting() -> Iterator[Front]:
    """Yield a server with `--default-max-tokens`, whose model never samples an end token."""
    yield from front(scripted_model(max_model_len=CONTEXT, next_token=lambda prefix: 70), default_max_tokens=LIMIT)


@pytest.fixture(scope="module")
def plain() -> Iterator[Front]:
    yield from front(scripted_model(max_model_len=CONTEXT))


def over_lmtp(model: LoadedModel, default_limit: int | None = None, **fields: Any) -> Request:
    """Return the engine request that an LMTP request becomes."""

    async def ask() -> Request:
        asked = decode_request(encode_request(Generate(**{"stream_id": 1, "model": "", "prompt": "a"} | fields)))
        assert isinstance(asked, Generate)
        with ExitStack() as held:
            host = AppState(ModelRegistry([model]), Admission(8, 1 << 20), default_max_tokens=default_limit)
            serving = RequestLifecycle(host, RequestRecord(id="a"), held)
            await serving.acquire_model(None)
            return (await generation_of(serving, asked, ())).parts[0].request

    return asyncio.run(ask())


# -- what a checkpoint recommends ------------------------------------------------------------------------------


@pytest.mark.few(4)
@every_api
def test_recommended_values_fill_in_what_a_request_leaves_out(recommending: Front, api: Api) -> None:
    assert recommended(recommending.ask(api).sampling) == RECOMMENDED
    for name, value in RECOMMENDED.items():
        own = {"temperature": 0.5, name: 2 if name == "top_k" else value / 3}
        if api.within == "sampling_params" and name == "typical_p":
            continue  # SGLang has none
        assert recommended(recommending.ask(api, **own).sampling) == {**RECOMMENDED, **own}


def test_recommended_values_fill_in_over_lmtp_in_python_and_on_the_command_line(recommending: Front) -> None:
    model, llm = recommending.model, LLM(recommending.model)
    assert recommended(over_lmtp(model).sampling) == RECOMMENDED
    own = over_lmtp(model, temperature=0.0, options={"top_k": 3}).sampling
    assert recommended(own) == {**RECOMMENDED, "temperature": 0.0, "top_k": 3}
    for ask in (llm.generate, lambda text: list(llm.stream(text))):
        ask("Say")  # type: ignore[operator]
        assert recommending.heard.last() == RECOMMENDED
    llm.chat(CHAT, max_tokens=1, top_k=3)
    assert recommending.heard.last() == {**RECOMMENDED, "top_k": 3}
    assert recommended(SamplingOptions().to_params(model)) == RECOMMENDED
    flags = SamplingOptions(temperature=0.0, sampling=("typical_p=0.5",)).to_params(model)
    assert recommended(flags) == {**RECOMMENDED, "temperature": 0.0, "typical_p": 0.5}
    bare = SamplingOptions().to_params(replace(model, defaults={}))
    assert SamplingOptions().to_params().temperature == bare.temperature


def test_a_native_request_may_want_the_likeliest(recommending: Front) -> None:
    for do_sample, expected in ((False, {**RECOMMENDED, "temperature": 0.0}), (True, RECOMMENDED)):
        assert recommended(recommending.ask(APIS["tgi"], do_sample=do_sample).sampling) == expected


@pytest.mark.parametrize("name", ["tgi", "run"])
def test_a_recommended_length_counts_where_none_is_given(name: str) -> None:
    api = APIS[name]
    for found in front(replace(scripted_model(), defaults={"max_tokens": 3})):
        lengths = [found.ask(api, **{api.limit: given}).sampling.max_tokens for given in (None, 2)]
        assert lengths == [3, 2]


# -- the limit of tokens ---------------------------------------------------------------------------------------

OPEN = [name for name in APIS if name != "messages"]  # there it is required


@pytest.mark.few(4)
@pytest.mark.parametrize("name", OPEN)
def test_a_request_that_sets_no_limit_has_the_servers(limiting: Front, plain: Front, name: str) -> None:
    api = APIS[name]
    assert limiting.ask(api).sampling.max_tokens == LIMIT
    for limit in (LIMIT + 3, 2):
        assert limiting.ask(api, **{api.limit: limit}).sampling.max_tokens == limit
    assert plain.ask(api).sampling.max_tokens == api.own_limit


def test_lmtp_has_the_servers_limit_too(limiting: Front) -> None:
    assert over_lmtp(limiting.model, LIMIT).sampling.max_tokens == LIMIT
    assert over_lmtp(limiting.model, LIMIT, max_tokens=32).sampling.max_tokens == 32
    assert over_lmtp(limiting.model).sampling.max_tokens == 32
    long = over_lmtp(limiting.model, 5 * CONTEXT, prompt=(70,) * (CONTEXT - 4))
    assert long.sampling.max_tokens == 4


def test_a_prompt_that_leaves_less_room_is_answered(limiting: Front) -> None:
    prompt = [70] * (CONTEXT - 4)
    assert limiting.ask(APIS["completions"], prompt=prompt).sampling.max_tokens == 4
    limiting.ask(APIS["completions"], prompt=[prompt, prompt[6:]], min_tokens=3)
    assert sorted(request.sampling.max_tokens or 0 for request in limiting.heard.requests[-2:]) == [4, LIMIT]


@pytest.mark.parametrize("name", ["completions", "chat"])
def test_a_beam_search_has_the_servers_limit(limiting: Front, name: str) -> None:
    request = limiting.ask(APIS[name], use_beam_search=True, best_of=2, n=1, temperature=0)
    assert request.controller.max_tokens == LIMIT  # type: ignore[attr-defined]


def test_the_servers_limit_comes_before_what_a_checkpoint_recommends() -> None:
    for found in front(replace(scripted_model(), defaults={"max_tokens": 50}), default_max_tokens=LIMIT):
        assert found.ask(APIS["chat"]).sampling.max_tokens == LIMIT


def test_clients_are_told_the_servers_limit(limiting: Front, plain: Front) -> None:
    for each, wanted in ((limiting, LIMIT), (plain, None)):
        (row,) = each.client.get("/v1/models").json()["data"]
        assert row["default_max_tokens"] == each.client.get("/v1/status").json()["default_max_tokens"] == wanted


def test_the_flag_of_the_limit_is_checked() -> None:
    assert LimitOptions(default_max_tokens=7).add_to(ServeSettings()).http.default_max_tokens == 7
    assert LimitOptions().add_to(ServeSettings()).http.default_max_tokens is None
    with pytest.raises(InvalidRequest, match="default_max_tokens is 0; must be at least 1"):
        LimitOptions(default_max_tokens=0).add_to(ServeSettings())


# -- priority and deadline -------------------------------------------------------------------------------------


@every_term
def test_priority_and_deadline_reach_the_engine(api: Api) -> None:
    model = fake_model()
    client = TestClient(create_app(ModelRegistry([model]), HttpSettings(request_timeout=1000)))
    before = time.monotonic()
    client.post(api.path, json=api.with_(priority=-3, deadline=500)).raise_for_status()
    client.post(api.path, json=api.body).raise_for_status()
    first, second = model.client.requests  # type: ignore[attr-defined]
    after = time.monotonic()
    assert first.priority == -3 and before + 500 <= first.deadline <= after + 500
    assert second.priority == 0 and before + 1000 <= second.deadline <= after + 1000


@every_term
def test_priority_and_deadline_are_checked(api: Api) -> None:
    model = fake_model()
    client = TestClient(create_app(ModelRegistry([model])))
    for terms in ({"priority": 101}, {"deadline": 0}, {"deadline": 1e9}, {"priority": "high"}):
        answer = client.post(api.path, json=api.with_(**terms))
        assert answer.status_code in (400, 422) and next(iter(terms)) in answer.text
    assert not model.client.requests  # type: ignore[attr-defined]


@every_term
def test_a_key_may_step_back_and_not_push_forward(api: Api, tmp_path: Path) -> None:
    model, keys = fake_model(), KeyStore(tmp_path / "keys.db")
    client = TestClient(create_app(ModelRegistry([model]), keys=keys))
    client.headers["api-key"] = keys.add("ann")
    client.post(api.path, json=api.with_(priority=3)).raise_for_status()
    refused = client.post(api.path, json=api.with_(priority=-1))
    assert refused.status_code in (400, 422) and "may ask for 0 or more" in refused.text
    keys.set_limits("ann", UserLimits(most_urgent=-1))
    client.post(api.path, json=api.with_(priority=-1)).raise_for_status()
    keys.close()
    assert [request.priority for request in model.client.requests] == [3, -1]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "request_",
    [
        Generate(stream_id=1, model="m", prompt=(1,), priority=-3, deadline=2.5),
        Score(stream_id=1, model="m", prompt=(1,), scored=(2,), priority=4),
    ],
)
def test_priority_and_deadline_travel_over_lmtp(request_: Any) -> None:
    assert decode_request(encode_request(request_)) == request_
    assert "priority" not in encode_request(Generate(stream_id=1, model="m", prompt=(1,)))


async def test_priority_and_deadline_are_checked_over_lmtp() -> None:
    wrong: list[tuple[dict[str, object], str]] = [
        ({"priority": 101}, "must be between -100"),
        ({"priority": "x"}, "must be an integer"),
        ({"priority": -1}, "user 'ann' may ask for 0 or more"),
        ({"deadline": 0}, "must be more than 0"),
        ({"deadline": "soon"}, "must be a number of seconds"),
    ]
    async with running() as setup:
        wire = setup.connect()
        for fields, message in wrong:
            for kind, rest in (("GENERATE", {}), ("SCORE", {"scored": [2]})):
                (refused,) = await wire.ask(kind, prompt=[1], **rest, **fields)
                assert message in refused["error"] and refused["code"] == "invalid_request"
        await setup.settle()


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_passed_deadline_ends_the_request_and_frees_all(is_stream: bool) -> None:
    """An output that could continue ends at its deadline, and the engine frees all of its resources."""
    is_read = threading.Event()
    model = overdue_model(is_read, num_prompt=1)
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "deadline": 2 * PATIENCE, "stream": is_stream}
    with served(model) as url, httpx.Client(base_url=url) as client:
        if is_stream:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                told = next(lines)
                is_read.set()
                told += "".join(lines)
        else:
            is_read.set()
            answer = client.post("/v1/completions", json=body)
            told = answer.text
        assert "deadline_exceeded" in told and "deadline passed" in told
        assert answer.status_code == (200 if is_stream else 504)
        check_free(model)
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).raise_for_status()


async def test_a_passed_deadline_ends_a_stream_of_lmtp_and_frees_all() -> None:
    is_read = threading.Event()
    model = overdue_model(is_read, num_prompt=1)
    async with running(model) as setup:
        wire = setup.connect()
        await wire.hello()
        terms = {"max_tokens": 400, "ignore_eos": True, "deadline": 2 * PATIENCE}
        await wire.send("GENERATE", prompt=[1], stream_id=1, **terms)
        await wire.next()
        is_read.set()
        found = await wire.stream()
        assert found[-1]["code"] == "deadline_exceeded" and "deadline passed" in found[-1]["error"]
        await setup.settle()
        check_free(model)


def check_free(model: LoadedModel) -> None:
    statistics = model.client.statistics()
    assert statistics.num_free_blocks == statistics.num_blocks and statistics.num_running == 0


async def test_the_log_has_the_terms_and_the_counts(capsys: pytest.CaptureFixture[str]) -> None:
    body = {"prompt": "a", "max_tokens": 3, "priority": 4, "regex": "[a-z]+"}
    with local_client(scripted_model()) as client:
        client.post("/v1/completions", json=body).raise_for_status()
    async with running() as setup:
        await setup.connect().ask("GENERATE", prompt=[1, 2], max_tokens=3, priority=2)
        await setup.settle()
    lines = capsys.readouterr().out.splitlines()
    for path, parts in (
        ("/v1/completions", "priority=4 constraint=regex sampled= forced= rewound=1 queue_ms= first_token_ms="),
        ("LMTP GENERATE", "user=ann priority=2 prompt=2 sampled=3 finish=length queue_ms="),
    ):
        (line,) = [line for line in lines if path in line]
        assert all(part in line for part in parts.split()), line


# -- counts of draft tokens ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def replying() -> Iterator[Front]:
    yield from front(scripted_model(next_token=saying(REPLY)))


@pytest.mark.parametrize("name", [name for name, api in APIS.items() if api.counts])
@pytest.mark.usefixtures("obeyed_drafts")
def test_answers_count_accepted_and_rejected_draft_tokens(replying: Front, name: str) -> None:
    answer = replying.client.post(APIS[name].path, json=APIS[name].with_(**APIS[name].counts))
    assert answer.status_code == 200, answer.text
    counts = next(found(answer.json()))
    assert counts["accepted_prediction_tokens"] > 0
    assert counts["rejected_prediction_tokens"] >= 0


def found(value: Any) -> Iterator[dict[str, int]]:
    """Yield the objects with token counts at any place of an answer."""
    if isinstance(value, dict):
        if "accepted_prediction_tokens" in value:
            yield value
        for inner in value.values():
            yield from found(inner)


def test_a_run_counts_draft_tokens_of_all_outputs_that_are_over() -> None:
    usage = RunUsage()
    for index, (drafted, accepted) in enumerate([(5, 3), (4, 4)]):
        counts = Usage(drafted_tokens=drafted, accepted_tokens=accepted)
        usage.note(Finished("a", index, FinishReason.LENGTH, counts))
    shape = usage.shape()
    assert (shape["accepted_prediction_tokens"], shape["rejected_prediction_tokens"]) == (7, 2)
