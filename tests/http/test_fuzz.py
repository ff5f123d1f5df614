"""Tests that any body gets a success or a 4xx error in the API's shape, and all resources of the request are freed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from bridle.http import HttpSettings
from bridle.http.openai.schemas import ChatBody, CompletionBody
from tests.http.harness import local_client, saying, scripted_model
from tests.http.json_strategies import JSON, SMALL

MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text(max_size=8)}
)
WILD_MESSAGE = st.fixed_dictionaries(
    {"role": st.text(max_size=4)}, optional={"content": JSON, "tool_calls": JSON, "name": JSON}
)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just("scripted"),
    "prompt": st.text(max_size=12) | st.lists(st.integers(0, 250), min_size=1, max_size=6) | st.just(["a", "b"]),
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}),
    "n": st.integers(1, 3),
    "best_of": SMALL,
    "max_tokens": SMALL,
    "max_completion_tokens": SMALL,
    "min_tokens": SMALL,
    "temperature": st.floats(0, 3),
    "top_p": st.floats(0, 1),
    "top_k": SMALL,
    "min_p": st.floats(0, 1),
    "typical_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-3, 3),
    "repetition_penalty": st.floats(0.5, 2),
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.floats(-200, 200), max_size=4),
    "seed": st.integers(0, 2**64),
    "stop": st.text(max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 300), max_size=3),
    "echo": st.booleans(),
    "logprobs": st.booleans() | SMALL,
    "top_logprobs": SMALL,
    "messages": st.lists(MESSAGE, min_size=1, max_size=3) | st.lists(MESSAGE | WILD_MESSAGE, max_size=3),
    "tools": st.just([{"type": "function", "function": {"name": "f"}}]),
    "chat_template_kwargs": st.dictionaries(st.text(max_size=6), JSON, max_size=2),
}


def bodies(model: type[ChatBody] | type[CompletionBody], required: str) -> st.SearchStrategy[dict[str, Any]]:
    """Generate bodies with mostly valid values, some arbitrary values, and unknown fields."""
    names = list(model.model_fields)
    fields = {name: GOOD.get(name, JSON) | JSON if name not in GOOD else GOOD[name] for name in names}
    wild = st.just({}) | st.dictionaries(st.sampled_from(names) | st.text(max_size=5), JSON, max_size=1)
    core = st.fixed_dictionaries(
        {required: GOOD[required]}, optional={k: v for k, v in fields.items() if k != required}
    )
    sparse = st.sets(st.sampled_from(names), max_size=4)
    return st.builds(
        lambda body, kept, extra: {k: v for k, v in body.items() if k == required or k in kept} | extra,
        core,
        sparse,
        wild,
    )


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    settings = HttpSettings(max_requests=8, max_choices=16)
    with local_client(
        scripted_model(next_token=saying("Hello <tool_call>there."), max_model_len=64), settings
    ) as client:
        yield client


def check(client: TestClient, path: str, content: bytes) -> None:
    answer = client.post(path, content=content)
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, (content, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert data[-1] == "[DONE]", (content, answer.text)
        assert all("error" not in json.loads(each) for each in data[:-1]), (content, answer.text)
    else:
        assert answer.json()["choices"]
    admission = client.app.state.http.admission  # type: ignore[attr-defined]
    assert (admission.num_requests, admission.num_tokens) == (0, 0)


@given(bodies(CompletionBody, "prompt"))
def test_no_completion_body_is_a_bug(client: TestClient, body: dict[str, Any]) -> None:
    check(client, "/v1/completions", json.dumps(body).encode())


@given(bodies(ChatBody, "messages"))
def test_no_chat_body_is_a_bug(client: TestClient, body: dict[str, Any]) -> None:
    check(client, "/v1/chat/completions", json.dumps(body).encode())


@given(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_bodies_that_are_anything(client: TestClient, content: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        check(client, path, content)


@given(st.text(max_size=20), st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH"]))
def test_paths_that_are_anything(client: TestClient, path: str, method: str) -> None:
    from urllib.parse import quote

    answer = client.request(method, "/v1/" + quote(path, safe=""))
    assert answer.status_code in (200, 400, 404, 405)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
