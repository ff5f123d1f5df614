"""Tests that no answer reveals the path of a model. The model's folder has a name that the tests search for in all
answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from bridle.config import ModelConfig
from bridle.errors import (
    AdapterRefused,
    BridleError,
    ControllerTrap,
    ControllerUnavailable,
    InternalError,
    InvalidRequest,
    ModelUnavailable,
    ShardUnavailable,
    UnknownModel,
    UnsupportedModel,
)
from bridle.http import create_app
from bridle.http.anthropic.errors import anthropic_body
from bridle.http.errors import error_body
from bridle.http.tgi.errors import native_body
from bridle.lmtp.failures import failure_of
from bridle.safe_repr import without_folders
from bridle.serving import ModelRegistry, load_model
from tests.fakes import tiny_checkpoints

TELLING = "the-secret-customer"
REFUSING = "{{ raise_exception('roles must alternate') if messages[0].content == 'refuse' }}{{ messages[0].no.more }}"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """Yield a client of a model whose chat template fails. The model's path is one of its names."""
    folder = tmp_path_factory.mktemp("models") / TELLING / "llama"
    shutil.copytree(tiny_checkpoints.cached_checkpoint("llama"), folder)
    (folder / "chat_template.jinja").write_text(REFUSING)
    registry = ModelRegistry()
    registry.add(load_model(ModelConfig(str(folder), num_blocks=32)), [str(folder)])
    with TestClient(create_app(registry), raise_server_exceptions=False) as client:
        client.folder = str(folder)  # type: ignore[attr-defined]
        yield client
    registry.close()


HELLO = [{"role": "user", "content": "hello"}]
REFUSED = [{"role": "user", "content": "refuse"}]
TOOLS = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "nothing"}}}]
POSTS: list[tuple[str, Any]] = [
    *((path, {"messages": messages, "max_tokens": 5}) for messages in (HELLO, REFUSED) for path in
      ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/chat_tokenize", "/invocations")),
    ("/v1/responses", {"input": "hello"}),
    ("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS}),
    *((path, body | {"model": name}) for name in ("nothing", "llama:nothing") for path, body in
      (("/v1/completions", {"prompt": "x"}), ("/generate", {"inputs": "x"}), ("/v1/embeddings", {"input": "x"}),
       ("/v1/messages", {"messages": HELLO, "max_tokens": 1}), ("/v1/run", {"controller": "x", "controller_arg": ""}))),
    ("/v1/completions", {"prompt": "x", "adapter": "nothing"}),
    ("/v1/completions", {"prompt": "x", "controller": "nothing"}),
    ("/v1/completions", {"prompt": "x" * 100_000}),
    ("/v1/completions", {"prompt": [1_000_000]}),
    ("/v1/completions", {"prompt": "x", "constraint": {"regex": "("}}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
    ("/v1/embeddings", {"input": ["x"], "dimensions": 3}),
    ("/generate", {"inputs": "x", "parameters": {"adapter_id": "nothing"}}),
    ("/v1/run", {"controller": "nothing", "controller_arg": ""}),
    ("/v1/adapters", {"name": "a", "source": "nowhere"}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}),
    ("/v1/models/load", {"model": "nothing"}),
    ("/v1/models/unload", {"model": "llama"}),
    ("/nowhere", {}),
]  # fmt: skip
GETS = ("/", "/info", "/v1/models", "/v1/models/llama", "/v1/models/nothing", "/v1/adapters", "/v1/adapters/nothing",
        "/v1/status", "/metrics", "/health", "/openapi.json", "/docs", "/v1/controllers/tags", "/nowhere")  # fmt: skip


@pytest.mark.parametrize(("path", "body"), POSTS)
def test_no_answer_tells_where_the_model_lies(client: TestClient, path: str, body: Any) -> None:
    answer = client.post(path, json=body)
    assert TELLING not in answer.text + str(answer.headers), answer.text


@pytest.mark.few(5)
@pytest.mark.parametrize("path", GETS)
def test_no_page_tells_it(client: TestClient, path: str) -> None:
    answer = client.get(path, headers={"accept": "text/html"})
    assert TELLING not in answer.text + str(answer.headers)


def test_who_names_the_model_by_its_path_gets_it(client: TestClient) -> None:
    body = {"model": client.folder, "prompt": "x", "max_tokens": 1}  # type: ignore[attr-defined]
    assert client.post("/v1/completions", json=body).json()["model"] == "llama"


MESSAGES = [
    "/srv/the-secret-customer/llama/config.json is not valid JSON",
    "the shard at unix:/run/the-secret-customer/shard.sock is lost",
    "failed to connect to all addresses; last error: unix:///run/the-secret-customer/shard.sock: refused",
    "the step failed: FileNotFoundError(2, 'No such file: /srv/the-secret-customer/x.so')",
    "OSError: [Errno 2] No such file or directory: '/srv/the-secret-customer and more/x y'",
]
TOLD_BY_US = [
    AdapterRefused,
    ControllerUnavailable,
    InternalError,
    ModelUnavailable,
    ShardUnavailable,
    UnsupportedModel,
]


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("kind", TOLD_BY_US)
def test_what_libraries_say_loses_its_folders(kind: type[BridleError], message: str) -> None:
    error = kind(message)
    for told in (error_body(error), native_body(error), anthropic_body(error), failure_of(1, error)):
        assert TELLING not in str(told)


@pytest.mark.parametrize("kind", [InvalidRequest, UnknownModel, ControllerTrap])
def test_what_a_request_said_is_told_as_it_is(kind: type[BridleError]) -> None:
    for message in (*MESSAGES, "the model '/a/b/c' is not served here"):
        assert json.dumps(message)[1:-1] in json.dumps(error_body(kind(message)))


@pytest.mark.parametrize(
    "text", ["see https://host/a/b/c", "POST /v1", "1/2/3 of a", "owner/name/file", "and/or", "text/event-stream"]
)
def test_what_is_no_path_stays(text: str) -> None:
    assert without_folders(text) == text


def test_the_name_of_a_file_stays() -> None:
    assert without_folders("/srv/x/config.json is not valid") == "config.json is not valid"
    assert without_folders("cannot read '/srv/x y/a b.json'") == "cannot read 'a b.json'"
    assert without_folders(f"{Path('/tmp/x/y')}: damaged") == "y: damaged"
