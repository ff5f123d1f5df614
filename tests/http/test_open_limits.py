"""`--default-max-tokens` is the limit of requests that set none, on every API."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest

from bridle.cli.limit_options import LimitOptions
from bridle.errors import InvalidRequest
from bridle.http import HttpSettings, ServeSettings
from bridle.lmtp.decoding import decode_request
from bridle.lmtp.encoding import encode_request
from bridle.lmtp.messages import Generate
from bridle.lmtp.server.requests import generation_of
from bridle.serving import LoadedModel, ModelRegistry
from bridle.serving.lifecycle.request_lifecycle import AppState, RequestLifecycle
from bridle.serving.lifecycle.request_record import RequestRecord
from bridle.serving.tenancy.admission import Admission
from tests.http.harness import Heard, scripted_model, served

LIMIT = 9
CONTEXT = 512
#: Each way to ask for text: its route, a body that sets no limit, the field that would, and its limit by itself.
OPEN: dict[str, tuple[str, dict[str, Any], tuple[str, ...], int | None]] = {
    "completions": ("/v1/completions", {"prompt": "Say"}, ("max_tokens",), 16),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, ("max_tokens",), None),
    "chat, newer field": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}]},
        ("max_completion_tokens",),
        None,
    ),
    "responses": ("/v1/responses", {"input": "Hi"}, ("max_output_tokens",), None),
    "tgi": ("/generate", {"inputs": "Say", "parameters": {}}, ("parameters", "max_new_tokens"), None),
    "tgi stream": ("/generate_stream", {"inputs": "Say", "parameters": {}}, ("parameters", "max_new_tokens"), None),
    "sglang": ("/generate", {"text": "Say", "sampling_params": {}}, ("sampling_params", "max_new_tokens"), 128),
    "run": ("/v1/run", {"controller": "none", "controller_arg": "Say"}, ("max_tokens",), None),
}


@pytest.fixture(scope="module")
def model() -> Iterator[LoadedModel]:
    made = scripted_model(max_model_len=CONTEXT, next_token=lambda prefix: 70)
    yield made
    made.close()


@pytest.fixture(scope="module")
def heard(model: LoadedModel) -> Heard:
    return Heard(model)


@pytest.fixture(scope="module")
def client(model: LoadedModel, heard: Heard) -> Iterator[httpx.Client]:
    settings = HttpSettings(default_max_tokens=LIMIT)
    with served(model, settings) as url, httpx.Client(base_url=url, timeout=600) as client:
        yield client


@pytest.fixture(scope="module")
def open_client() -> Iterator[tuple[httpx.Client, Heard]]:
    """A server without such a limit."""
    model = scripted_model(max_model_len=CONTEXT)
    heard = Heard(model)
    with served(model) as url, httpx.Client(base_url=url, timeout=600) as client:
        yield client, heard


def limit_of(client: httpx.Client, heard: Heard, route: str, body: dict[str, Any]) -> int | None:
    """The limit that a request has in the engine."""
    answer = client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return heard.requests[-1].sampling.max_tokens


def with_limit(body: dict[str, Any], path: tuple[str, ...], limit: int) -> dict[str, Any]:
    *outer, name = path
    return {**body, outer[0]: {**body[outer[0]], name: limit}} if outer else {**body, name: limit}


@pytest.mark.parametrize("api", OPEN)
def test_a_request_that_sets_no_limit_has_this_one(client: httpx.Client, heard: Heard, api: str) -> None:
    route, body, path, _ = OPEN[api]
    assert limit_of(client, heard, route, body) == LIMIT
    assert limit_of(client, heard, route, with_limit(body, path, LIMIT + 3)) == LIMIT + 3
    assert limit_of(client, heard, route, with_limit(body, path, 2)) == 2


@pytest.mark.parametrize("api", OPEN)
def test_without_it_each_api_has_its_own(open_client: tuple[httpx.Client, Heard], api: str) -> None:
    route, body, _, own = OPEN[api]
    assert limit_of(*open_client, route, body) == own


def test_a_prompt_that_leaves_less_room_is_answered(client: httpx.Client, heard: Heard) -> None:
    prompt = [70] * (CONTEXT - 4)
    assert limit_of(client, heard, "/v1/completions", {"prompt": prompt}) == 4
    answer = client.post("/v1/completions", json={"prompt": [prompt, prompt[6:]], "min_tokens": 3})
    assert answer.status_code == 200, answer.text
    assert sorted(request.sampling.max_tokens or 0 for request in heard.requests[-2:]) == [4, LIMIT]


def test_a_beam_search_has_it_too(client: httpx.Client, heard: Heard) -> None:
    fields = {"use_beam_search": True, "best_of": 2, "n": 1, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": "Hi"}]} | fields
    answers = [
        client.post("/v1/chat/completions", json=chat),
        client.post("/v1/completions", json={"prompt": "Say"} | fields),
    ]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    assert [request.controller.max_tokens for request in heard.requests[-2:]] == [LIMIT, LIMIT]  # type: ignore[attr-defined]


def test_it_comes_before_what_a_checkpoint_recommends() -> None:
    model = replace(scripted_model(), defaults={"max_tokens": 50})
    heard = Heard(model)
    with served(model, HttpSettings(default_max_tokens=LIMIT)) as url, httpx.Client(base_url=url) as client:
        assert limit_of(client, heard, *OPEN["chat"][:2]) == LIMIT


def lmtp_limit(model: LoadedModel, default: int | None, **fields: Any) -> int | None:
    async def ask() -> int | None:
        whole: dict[str, Any] = {"stream_id": 1, "model": "scripted", "prompt": "Say"} | fields
        asked = decode_request(encode_request(Generate(**whole)))
        assert isinstance(asked, Generate)
        with ExitStack() as held:
            host = AppState(ModelRegistry([model]), Admission(8, 1 << 20), default_max_tokens=default)
            serving = RequestLifecycle(host, RequestRecord(id="a"), held)
            await serving.acquire_model(None)
            return (await generation_of(serving, asked, ())).parts[0].request.sampling.max_tokens

    return asyncio.run(ask())


def test_lmtp_has_it_too(model: LoadedModel) -> None:
    assert lmtp_limit(model, LIMIT) == LIMIT
    assert lmtp_limit(model, LIMIT, max_tokens=32) == 32  # a client that says what is usual has said it
    assert lmtp_limit(model, None) == 32
    assert lmtp_limit(model, 5 * CONTEXT, prompt=(70,) * (CONTEXT - 4)) == 4


def test_clients_are_told(client: httpx.Client, open_client: tuple[httpx.Client, Heard]) -> None:
    for each, wanted in ((client, LIMIT), (open_client[0], None)):
        (row,) = each.get("/v1/models").json()["data"]
        assert row["default_max_tokens"] == each.get("/v1/status").json()["default_max_tokens"] == wanted


def test_the_flag_is_checked() -> None:
    assert LimitOptions(default_max_tokens=7).add_to(ServeSettings()).http.default_max_tokens == 7
    assert LimitOptions().add_to(ServeSettings()).http.default_max_tokens is None
    with pytest.raises(InvalidRequest, match="default_max_tokens is 0; must be at least 1"):
        LimitOptions(default_max_tokens=0).add_to(ServeSettings())
