"""Tests of requests that other servers' real clients send, and that an API's description does not mention."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from bridle.errors import UnknownModel
from bridle.http import HttpSettings, create_app
from bridle.http.middleware.content_coding import Gzip
from bridle.http.openai.tgi_client_chunks import native_chunks
from bridle.serving import ModelRegistry
from bridle.serving.tenancy.keys import KeyStore
from tests.http.harness import local_client, saying, scripted_model, without_template
from tests.serving.fakes import fake_model

HELLO = [{"role": "user", "content": "Hello"}]
ADDRESS = "http://127.0.0.1:8080/v1/"
REPLY = "Hello there."


@pytest.fixture(scope="module")
def http() -> Iterator[TestClient]:
    with local_client(scripted_model(next_token=saying(REPLY))) as client:
        yield client


# -- names ---------------------------------------------------------------------------------------------------------

NATIVE: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 2}}),
    ("/", {"inputs": "x", "parameters": {"max_new_tokens": 2}}),
    ("/tokenize", {"inputs": "x"}),
    ("/chat_tokenize", {"messages": HELLO}),
    ("/invocations", {"messages": HELLO, "max_tokens": 2}),
    ("/invocations", {"prompt": "x", "max_tokens": 2}),
    ("/invocations", {"inputs": "x", "parameters": {"max_new_tokens": 2}}),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 2}),
]


@pytest.mark.few(13)
@pytest.mark.parametrize(("path", "body"), NATIVE + OTHERS)
@pytest.mark.parametrize("name", [ADDRESS, "HTTPS://endpoint.example/", "tgi", "dummy"])
def test_an_address_means_the_one_model(http: TestClient, path: str, body: dict[str, Any], name: str) -> None:
    """The model's name may be the endpoint's address, as Hugging Face's JavaScript client sends it, or the
    text-generation client's `tgi`."""
    assert http.post(path, json=body | {"model": name}).status_code == 200
    assert http.post(path, json=body | {"model": "other"}).status_code == 404


def test_among_several_models_an_address_means_the_first_on_native_routes_only() -> None:
    registry = ModelRegistry([scripted_model(), scripted_model(name="second")])
    with TestClient(create_app(registry)) as client:
        for path, body in NATIVE:
            assert client.post(path, json=body | {"model": ADDRESS}).status_code == 200, path
        assert client.get("/info", params={"model": ADDRESS}).json()["model_id"] == "scripted"
        for path, body in OTHERS:
            assert client.post(path, json=body | {"model": ADDRESS}).status_code == 404, path
    with pytest.raises(UnknownModel):
        registry.slot_of(ADDRESS)
    registry.close()


# -- HEAD ----------------------------------------------------------------------------------------------------------


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "path", ["/", "/health", "/health/ready", "/ping", "/metrics", "/v1/models", "/info", "/docs", "/openapi.json"]
)
def test_head_is_get_without_a_body(http: TestClient, path: str) -> None:
    got, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"") == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert path == "/metrics" or head.headers["content-length"] == got.headers["content-length"]


def test_head_over_a_real_connection_leaves_it_usable(server: str) -> None:
    import httpx

    with httpx.Client(base_url=server) as client:
        assert [client.head("/v1/models").status_code, client.get("/health").status_code] == [200, 200]
        assert client.head("/v1/completions").status_code == 405
        assert client.head("/nothing").status_code == 404


# -- compressed bodies ---------------------------------------------------------------------------------------------


def packed(client: TestClient, data: bytes, coding: str = "gzip") -> Any:
    return client.post("/v1/completions", content=data, headers={"content-encoding": coding})


def test_a_gzip_body_is_read(http: TestClient) -> None:
    body = json.dumps({"prompt": "Say it:", "max_tokens": 30}).encode()
    for coding in ("gzip", "x-gzip", "GZIP"):
        assert packed(http, gzip.compress(body), coding).json()["choices"][0]["text"] == REPLY
    assert packed(http, body, "identity").status_code == 200


def test_what_is_no_gzip_is_refused(http: TestClient) -> None:
    body = gzip.compress(b'{"prompt": "x"}')
    for data, reason in (
        (b"plain", "incorrect header"),
        (body[:-9], "is cut off before its end"),
        (body * 2, "more bytes follow"),
    ):
        refused = packed(http, data)
        assert refused.status_code == 400 and reason in refused.json()["error"]["message"], refused.text
    for coding in ("br", "deflate", "gzip, gzip"):
        refused = packed(http, body, coding)
        assert refused.status_code == 415 and coding in refused.json()["error"]["message"]


@pytest.mark.few(2)
@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/v1/messages", "/v1/embeddings"])
def test_a_bomb_stays_small(path: str) -> None:
    bomb = gzip.compress(b" " * (64 << 20))
    assert len(bomb) < 100_000
    with local_client(fake_model(), HttpSettings(max_body_bytes=1 << 20)) as client:
        refused = client.post(path, content=bomb, headers={"content-encoding": "gzip"})
    assert refused.status_code == 413
    assert "at most 1048576 bytes" in refused.text


@given(st.binary(max_size=2_000), st.integers(1, 300), st.integers(0, 3_000))
def test_no_more_is_unpacked_than_is_allowed(data: bytes, step: int, limit: int) -> None:
    """Decompression stops one byte after the limit, for any sizes of pieces and for decompression bombs."""
    body, unpacker, made = gzip.compress(data * 5), Gzip(), b""
    for start in range(0, len(body), step):
        made += unpacker.push(body[start : start + step], limit - len(made))
        if len(made) > limit:
            break
    assert len(made) <= limit + 1
    if len(made) <= limit:
        unpacker.close()
        assert made == data * 5
    else:
        assert (data * 5).startswith(made)


def test_uploads_are_not_unpacked(http: TestClient) -> None:
    answer = http.post("/v1/controllers", content=zlib.compress(b"x"), headers={"content-encoding": "gzip"})
    assert answer.status_code in (415, 501)  # without a runtime nothing is read


# -- errors --------------------------------------------------------------------------------------------------------


def test_a_missing_key_has_the_type_of_each_api(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys.json")
    store.add("ann")
    with TestClient(create_app(ModelRegistry([fake_model()]), keys=store)) as client:
        native = client.post("/generate", json={"inputs": "x"})
        assert (native.status_code, native.json()["error_type"]) == (401, "authentication")
        ours = client.post("/v1/chat/completions", json={"messages": HELLO})
        assert (ours.status_code, ours.json()["error"]["type"]) == (401, "authentication_error")
        theirs = client.post("/v1/messages", json={"messages": HELLO, "max_tokens": 1})
        assert (theirs.status_code, theirs.json()["error"]["type"]) == (401, "authentication_error")


def test_a_missing_chat_template_has_a_type_of_its_own(tmp_path: Path) -> None:
    with local_client(scripted_model(text=without_template(tmp_path))) as client:
        native = client.post("/chat_tokenize", json={"messages": HELLO})
        assert (native.status_code, native.json()["error_type"]) == (422, "template_error")
        assert native.json()["error"].startswith("Template error: 'scripted' has no chat template")
        chat = client.post("/v1/chat/completions", json={"messages": HELLO})
        assert (chat.status_code, chat.json()["error_type"]) == (400, "template_error")
        assert chat.json()["error"]["code"] == "template_error"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 100_000}),
        ("/v1/completions", {"prompt": "x " * 2_000}),
        ("/v1/completions", {"prompt": "x" * 100_000}),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 100_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 100_000}]}),
        ("/v1/embeddings", {"input": "x " * 2_000}),
    ],
)
def test_a_context_that_is_too_small_is_told_in_openais_words(http: TestClient, path: str, body: Any) -> None:
    """Frameworks such as LiteLLM recognize this error by its code and message, and shorten the conversation."""
    error = http.post(path, json=body).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "This model's maximum context length is 512 tokens" in error["message"]


# -- Anthropic's client --------------------------------------------------------------------------------------------


def test_anthropics_client_lists_models(server: str) -> None:
    client = anthropic.Anthropic(base_url=server, api_key="none", max_retries=0)
    (model,) = client.models.list().data
    assert (model.id, model.type, model.display_name) == ("scripted", "model", "scripted")
    assert client.models.retrieve("scripted").created_at.year >= 2024


def test_openais_client_lists_them_as_before(server: str, http: TestClient) -> None:
    client = openai.OpenAI(base_url=server + "/v1", api_key="none", max_retries=0)
    assert [(model.id, model.object) for model in client.models.list()] == [("scripted", "model")]
    assert "display_name" not in http.get("/v1/models").json()["data"][0]


@pytest.mark.parametrize("is_stream", [False, True])
def test_max_tokens_beyond_the_context_are_capped_and_told(http: TestClient, is_stream: bool) -> None:
    """Clients of this API must send `max_tokens`, and send the same number to every model."""
    body = {"messages": HELLO, "max_tokens": 32_000, "stream": is_stream}
    answer = http.post("/v1/messages", json=body)
    told = "".join(re.findall(r'"text":"([^"]*)"', answer.text))  # a stream may tell a word in pieces
    assert answer.status_code == 200 and REPLY.split()[0] in told
    num_prompt = http.post("/v1/messages/count_tokens", json={"messages": HELLO}).json()["input_tokens"]
    assert answer.headers["x-max-tokens"] == str(512 - num_prompt)
    assert "x-max-tokens" not in http.post("/v1/messages", json=body | {"max_tokens": 20}).headers
    too_long = [{"role": "user", "content": "x y " * 400}]
    refused = http.post("/v1/messages", json=body | {"messages": too_long})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"


# -- text-generation's client --------------------------------------------------------------------------------------

#: Every field that it has, as it sends them.
NULLS = dict.fromkeys(
    [
        "repetition_penalty",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "max_tokens",
        "n",
        "presence_penalty",
        "seed",
        "temperature",
        "top_p",
        "tools",
        "tool_choice",
    ]
)


def chunks_of(text: str) -> list[Any]:
    """Return the chunks of a stream as the client reads it, one for every data line."""
    return [json.loads(line.removeprefix("data:")) for line in text.splitlines() if line.startswith("data:")]


def test_text_generations_client_reads_streams_of_chats(http: TestClient) -> None:
    body = {"model": "tgi", "messages": HELLO, "stream": True}
    text = http.post("/v1/chat/completions", json=body | NULLS).text
    deltas = [choice["delta"] for chunk in chunks_of(text) for choice in chunk["choices"]]
    assert "".join(delta["content"] or "" for delta in deltas) == REPLY
    assert all(delta["role"] == "assistant" and delta["tool_calls"] is None for delta in deltas)


def test_other_clients_get_openais_streams(http: TestClient) -> None:
    body = {"model": "tgi", "messages": HELLO, "stream": True}
    text = http.post("/v1/chat/completions", json=body).text
    assert text.endswith("data: [DONE]\n\n")
    first, *others = chunks_of(text.removesuffix("data: [DONE]\n\n"))
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in choice["delta"] for chunk in others for choice in chunk["choices"])


def test_calls_of_tools_are_one_object_to_it() -> None:
    convert = native_chunks()

    def said(**call: Any) -> Any:
        chunk = {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0} | call]}}]}
        return convert(chunk)["choices"][0]["delta"]["tool_calls"]

    begun = said(id="abc", type="function", function={"name": "f", "arguments": ""})
    assert begun == {"index": 0, "id": "abc", "type": "function", "function": {"name": "f", "arguments": ""}}
    more = said(function={"arguments": '{"a"'})
    assert more == {"index": 0, "id": "abc", "type": "function", "function": {"name": None, "arguments": '{"a"'}}
