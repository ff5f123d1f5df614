"""Tests of refusals before a route is reached: they have the shape of the API whose path was called."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import anthropic
import httpx
import pytest
from starlette.testclient import TestClient
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from bridle.http import create_app
from bridle.lmtp.server import websocket_front
from bridle.serving import ModelRegistry
from bridle.serving.tenancy.keys import KeyStore
from tests.http.harness import served
from tests.serving.fakes import fake_model
from tests.waiting import PATIENCE

OPENAI = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/nope", "/nope"]
ANTHROPIC = ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"]
NATIVE = ["/generate", "/generate_stream", "/", "/info", "/tokenize", "/invocations"]


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[TestClient]:
    """Yield a client of a server that requires a key."""
    keys = KeyStore(tmp_path / "keys.db")
    yield TestClient(create_app(ModelRegistry([fake_model()]), keys=keys))
    keys.close()


def check_shape(path: str, body: Any, message: str) -> None:
    if path in NATIVE:
        assert set(body) == {"error", "error_type"} and message in body["error"]
    elif path in ANTHROPIC:
        assert body["type"] == "error" and message in body["error"]["message"]
    else:
        assert "type" not in body and message in body["error"]["message"] and body["error"]["code"]


@pytest.mark.parametrize("path", OPENAI + ANTHROPIC + NATIVE)
def test_a_request_without_a_key_is_refused_in_the_apis_shape(closed: TestClient, path: str) -> None:
    answer = closed.post(path, json={})
    assert answer.status_code == 401
    check_shape(path, answer.json(), "an API key is needed")


@pytest.mark.parametrize("path", [*OPENAI, *ANTHROPIC, "/generate"])
def test_methods_and_paths_that_there_are_not(path: str) -> None:
    client = TestClient(create_app(ModelRegistry([fake_model()])))
    answer = client.delete(path)
    assert answer.status_code == (404 if path in ("/v1/nope", "/nope", "/v1/messages/batches") else 405)
    check_shape(path, answer.json(), "DELETE")
    if path in OPENAI and answer.status_code == 405:
        assert answer.json()["error"]["code"] == "method_not_allowed"
    assert answer.status_code == 404 or answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
        ("/generate", {"inputs": "a"}),
        ("/v1/completions", {"prompt": "a"}),
    ],
)
def test_a_bug_is_an_internal_error_of_the_api(path: str, body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(
        "bridle.http.middleware.request_context._log", MagicMock()
    )  # without settings, tracebacks take it many seconds
    monkeypatch.setattr("bridle.serving.lifecycle.request_lifecycle.RequestLifecycle.acquire_model", broken)
    client = TestClient(create_app(ModelRegistry([fake_model()])), raise_server_exceptions=False)
    answer = client.post(path, json=body)
    assert answer.status_code == 500 and "secret" not in answer.text
    check_shape(path, answer.json(), answer.headers["x-request-id"])
    if path in OPENAI:
        assert answer.json()["error"]["code"] == "internal_error"


def test_the_real_client_reads_why_it_is_not_let_in(tmp_path: Path) -> None:
    keys = KeyStore(tmp_path / "keys.db")
    with (
        served(fake_model(), keys=keys) as url,
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        client.messages.create(model="fake", max_tokens=3, messages=[{"role": "user", "content": "a"}])
    body: Any = refused.value.body
    assert body["error"]["type"] == "authentication_error"
    keys.close()


def test_one_connection_too_many() -> None:
    with served(fake_model(), fronts=[websocket_front()], max_connections=2) as url:
        host, port = url.removeprefix("http://").split(":")
        # What came first is served, also while it says nothing.
        early = [httpx.Client(base_url=url) for _ in range(2)]
        assert {client.get("/v1/models").status_code for client in early} == {200}
        for path in ("/generate", "/v1/messages", "/v1/completions"):
            answer = httpx.post(url + path, json={})
            assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
            check_shape(path, answer.json(), "has its 2 connections already")
        assert httpx.get(url + "/health/live").status_code == 200
        with pytest.raises(InvalidStatus) as refused:
            connect(f"ws://{host}:{port}/", open_timeout=PATIENCE)
        assert refused.value.response.status_code == 429
        assert early[0].get("/v1/models").status_code == 200
        for client in early:
            client.close()
