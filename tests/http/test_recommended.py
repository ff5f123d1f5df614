"""What a checkpoint's `generation_config.json` recommends is what requests get that leave it out, on every API."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest

from bridle import LLM
from bridle.cli.options import SamplingOptions
from bridle.lmtp.messages import Generate
from bridle.lmtp.server.requests import generation_of
from bridle.sampling import SamplingParams
from bridle.serving import LoadedModel, ModelRegistry
from bridle.serving.lifecycle.request_lifecycle import AppState, RequestLifecycle
from bridle.serving.lifecycle.request_record import RequestRecord
from bridle.serving.tenancy.admission import Admission
from tests.http.harness import RECOMMENDED, Heard, recommended, scripted_model, served
from tests.http.routes import ROUTES, post


@pytest.fixture(scope="module")
def model() -> Iterator[LoadedModel]:
    made = replace(scripted_model(), defaults=dict(RECOMMENDED))
    yield made
    made.close()


@pytest.fixture(scope="module")
def heard(model: LoadedModel) -> Heard:
    return Heard(model)


@pytest.fixture(scope="module")
def client(model: LoadedModel, heard: Heard) -> Iterator[httpx.Client]:
    with served(model) as url, httpx.Client(base_url=url, timeout=600) as client:
        yield client


@pytest.mark.parametrize("route", ROUTES)
def test_each_route_recommends_the_same(client: httpx.Client, heard: Heard, route: str) -> None:
    assert post(client, route, {}).status_code == 200
    assert heard.last() == RECOMMENDED
    for name, value in RECOMMENDED.items():
        assert post(client, route, {"temperature": 0.5, name: value / 3 if name != "top_k" else 2}).status_code == 200
        own = {"temperature": 0.5, name: value / 3 if name != "top_k" else 2}
        assert heard.last() == dict(RECOMMENDED) | own


def test_a_native_request_may_want_the_likeliest(client: httpx.Client, heard: Heard) -> None:
    assert post(client, "/generate", {"do_sample": False}).status_code == 200
    assert heard.last() == dict(RECOMMENDED) | {"temperature": 0.0}
    assert post(client, "/generate", {"do_sample": True}).status_code == 200
    assert heard.last() == RECOMMENDED


def lmtp_sampling(model: LoadedModel, **fields: Any) -> SamplingParams:
    async def ask() -> SamplingParams:
        with ExitStack() as held:
            registry = ModelRegistry([model])
            serving = RequestLifecycle(AppState(registry, Admission(8, 1 << 20)), RequestRecord(id="a"), held)
            await serving.acquire_model(None)
            generation = await generation_of(serving, Generate(stream_id=1, model="", prompt="Say", **fields), ())
            return generation.parts[0].request.sampling

    return asyncio.run(ask())


def test_lmtp_recommends_the_same(model: LoadedModel) -> None:
    assert recommended(lmtp_sampling(model)) == RECOMMENDED
    own = lmtp_sampling(model, temperature=0.0, options={"top_k": 3})
    assert recommended(own) == dict(RECOMMENDED) | {"temperature": 0.0, "top_k": 3}


def test_the_command_line_recommends_the_same(model: LoadedModel) -> None:
    assert recommended(SamplingOptions().to_params(model)) == RECOMMENDED
    own = SamplingOptions(temperature=0.0, sampling=("typical_p=0.5",)).to_params(model)
    assert recommended(own) == dict(RECOMMENDED) | {"temperature": 0.0, "typical_p": 0.5}
    assert (
        SamplingOptions().to_params().temperature
        == SamplingOptions().to_params(replace(model, defaults={})).temperature
    )


def test_python_recommends_the_same(model: LoadedModel, heard: Heard) -> None:
    llm = LLM(model)
    for ask in (llm.generate, lambda text: list(llm.stream(text))):
        ask("Say")  # type: ignore[operator]
        assert heard.last() == RECOMMENDED
    llm.chat([{"role": "user", "content": "Hi"}], max_tokens=1, top_k=3)
    assert heard.last() == dict(RECOMMENDED) | {"top_k": 3}


@pytest.mark.parametrize(("route", "name"), [("/generate", "max_new_tokens"), ("/v1/run", "max_tokens")])
def test_a_recommended_length_counts_where_none_is_given(route: str, name: str) -> None:
    with served(replace(scripted_model(), defaults={"max_tokens": 3})) as url, httpx.Client(base_url=url) as client:
        answers = [
            post(client, route, {name: given, "ignore_eos": True} if route == "/generate" else {name: given})
            for given in (None, 2)
        ]
        assert [answer.status_code for answer in answers] == [200, 200]
        if route == "/generate":
            counts = [
                post(client, route, {name: given, "details": True}).json()["details"]["generated_tokens"]
                for given in (None, 2)
            ]
            assert counts[0] <= 3 and counts[1] <= 2
