"""Tests of the requests that Open WebUI 0.12.4 sends to an Ollama server and to an OpenAI server. The request bodies
are exactly those of Open WebUI (`routers/ollama.py`, `routers/openai.py`, `utils/payload.py`). The tests check the
parts of the answers that Open WebUI reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.http.harness import NAME, local_client, saying, scripted_model

REPLY = "good day"
HEADERS = {
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "Ann",
    "X-OpenWebUI-User-Id": "1",
    "X-OpenWebUI-User-Email": "ann@example.org",
    "X-OpenWebUI-User-Role": "admin",
}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "get_time", "description": "", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"index": 0, "id": "c1", "function": {"name": "get_time", "arguments": {}}}
CALLED = [
    *MESSAGES,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "noon", "tool_call_id": "c1"},
]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with local_client(scripted_model(next_token=saying(REPLY), embedding_size=8)) as made:
        yield made


def send(client: TestClient, method: str, path: str, body: Any = None) -> Any:
    """Post a body as encoded JSON text, like Open WebUI."""
    content = None if body is None else json.dumps(body)
    answer = client.request(method, path, content=content, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return answer


def test_it_lists_models_and_when_they_expire(client: TestClient) -> None:
    """`get_all_models` merges `/api/tags` with `expires_at` of `/api/ps`."""
    models = {row["model"]: row for row in send(client, "GET", "/api/tags").json()["models"]}
    assert models[NAME]["name"] == NAME and "details" in models[NAME]
    (loaded,) = send(client, "GET", "/api/ps").json()["models"]
    assert loaded["model"] in models and int(datetime.fromisoformat(loaded["expires_at"]).timestamp()) > 0
    assert send(client, "GET", "/api/version").json()["version"].count(".") == 2
    shown = send(client, "POST", "/api/show", {"name": NAME, "model": NAME}).json()
    assert "completion" in shown["capabilities"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"stream": False},
        {"options": {"temperature": 0, "top_p": 0.9, "num_ctx": 256, "repeat_last_n": 64, "num_predict": 40}},
        {"options": {"mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5.0, "tfs_z": 1, "use_mmap": True}},
        {"keep_alive": "5m", "think": False},
        {"keep_alive": 300, "system": "Be brief."},
        {"format": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        {"tools": [TOOL]},
        {"messages": CALLED, "tools": [TOOL]},
    ],
)
def test_chats(client: TestClient, changes: dict[str, Any]) -> None:
    """`generate_chat_completion` reads the stream line by line, up to the object with `done`."""
    body = {"model": NAME, "messages": MESSAGES, "stream": True, **changes}
    answer = send(client, "POST", "/api/chat", body)
    rows = [json.loads(line) for line in answer.text.splitlines()]
    assert rows[-1]["done"] and rows[-1]["eval_count"] > 0
    text = "".join(row["message"]["content"] for row in rows)
    if "format" in changes:
        assert "a" in json.loads(text)
    else:
        assert text == REPLY


def test_generate_embed_and_unload(client: TestClient) -> None:
    made = {"model": NAME, "prompt": "hi", "stream": True, "options": {"num_predict": 20}}
    rows = [json.loads(line) for line in send(client, "POST", "/api/generate", made).text.splitlines()]
    assert "".join(row["response"] for row in rows) == REPLY
    many = {"model": NAME, "input": ["a", "b"], "prompt": "a\nb", "truncate": True, "keep_alive": "5m"}
    assert len(send(client, "POST", "/api/embed", many).json()["embeddings"]) == 2
    assert len(send(client, "POST", "/api/embeddings", {"model": NAME, "prompt": "a"}).json()["embedding"]) == 8
    # `unload_model`; this model is served permanently, and the error says so.
    unload = client.post("/api/generate", content=json.dumps({"model": NAME, "keep_alive": 0, "prompt": ""}))
    assert unload.status_code == 400 and "cannot be unloaded" in unload.json()["error"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_router(client: TestClient, stream: bool) -> None:
    models = send(client, "GET", "/v1/models").json()["data"]
    assert NAME in [model["id"] for model in models]
    body: dict[str, Any] = {
        "model": NAME,
        "messages": MESSAGES,
        "stream": stream,
        "temperature": 0.7,
        "max_tokens": 20,
        "tools": [TOOL],
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }
    answer = send(client, "POST", "/v1/chat/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream" if stream else "application/json")
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if "chat.completion" in line]
    told = [json.loads(line)["choices"] for line in lines]
    texts = [each[0].get("delta", each[0].get("message", {})).get("content") for each in told if each]
    assert "".join(filter(None, texts)) == REPLY
    task = {"model": NAME, "messages": MESSAGES, "stream": False, "max_completion_tokens": 300}  # titles and tags
    assert send(client, "POST", "/v1/chat/completions", task).json()["choices"][0]["message"]["content"] == REPLY
    vectors = send(client, "POST", "/v1/embeddings", {"model": NAME, "input": ["a", "b"]}).json()["data"]
    assert len(vectors) == 2
