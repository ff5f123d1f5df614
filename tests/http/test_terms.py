"""`priority` and `deadline` on every route: they reach the engine, are checked in one way, and end what is late."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from bridle.http import HttpSettings, create_app
from bridle.serving import ModelRegistry
from bridle.serving.tenancy.keys import KeyStore
from bridle.serving.tenancy.rate_limit import UserLimits
from tests.http.harness import local_client, overdue_model, scripted_model, served
from tests.serving.fakes import fake_model
from tests.waiting import PATIENCE

CHAT = [{"role": "user", "content": "a"}]
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": CHAT}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 9}),
    ("/v1/run", {"controller": "none", "controller_arg": "a"}),
    ("/generate", {"inputs": "a"}),
    ("/generate_stream", {"inputs": "a"}),
    ("/", {"inputs": "a"}),
    ("/invocations", {"inputs": "a"}),
    ("/invocations", {"messages": CHAT}),
]


def with_terms(body: dict[str, Any], **terms: Any) -> dict[str, Any]:
    return body | ({"parameters": terms} if "inputs" in body else terms)


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_they_reach_the_engine(path: str, body: dict[str, Any]) -> None:
    model = fake_model()
    client = TestClient(create_app(ModelRegistry([model]), HttpSettings(request_timeout=1000)))
    before = time.monotonic()
    client.post(path, json=with_terms(body, priority=-3, deadline=500)).raise_for_status()
    client.post(path, json=body).raise_for_status()
    first, second = model.client.requests  # type: ignore[attr-defined]
    after = time.monotonic()
    assert first.priority == -3 and before + 500 <= first.deadline <= after + 500
    assert second.priority == 0 and before + 1000 <= second.deadline <= after + 1000


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("terms", [{"priority": 101}, {"deadline": 0}, {"deadline": 1e9}, {"priority": "high"}])
def test_they_are_checked(path: str, body: dict[str, Any], terms: dict[str, Any]) -> None:
    model = fake_model()
    answer = TestClient(create_app(ModelRegistry([model]))).post(path, json=with_terms(body, **terms))
    assert answer.status_code in (400, 422)
    assert next(iter(terms)) in answer.text
    assert not model.client.requests  # type: ignore[attr-defined]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_key_may_step_back_and_not_push_forward(path: str, body: dict[str, Any], tmp_path: Path) -> None:
    model, keys = fake_model(), KeyStore(tmp_path / "keys.db")
    client = TestClient(create_app(ModelRegistry([model]), keys=keys))
    client.headers["api-key"] = keys.add("ann")
    client.post(path, json=with_terms(body, priority=3)).raise_for_status()
    refused = client.post(path, json=with_terms(body, priority=-1))
    assert refused.status_code in (400, 422) and "may ask for 0 or more" in refused.text
    keys.set_limits("ann", UserLimits(most_urgent=-1))
    client.post(path, json=with_terms(body, priority=-1)).raise_for_status()
    keys.close()
    assert [request.priority for request in model.client.requests] == [3, -1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_passed_deadline_ends_the_request_and_frees_all(is_stream: bool) -> None:
    """However long the output could go on; the engine has nothing of it left."""
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
        statistics = model.client.statistics()
        assert statistics.num_free_blocks == statistics.num_blocks and statistics.num_running == 0
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).raise_for_status()


def test_the_log_tells_the_terms_and_the_counts(capsys: pytest.CaptureFixture[str]) -> None:
    body = {"prompt": "a", "max_tokens": 3, "priority": 4, "regex": "[a-z]+"}
    with local_client(scripted_model()) as client:
        client.post("/v1/completions", json=body).raise_for_status()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "/v1/completions" in line]
    for part in ("priority=4", "constraint=regex", "sampled=", "forced=", "rewound=0", "queue_ms=", "first_token_ms="):
        assert part in line
