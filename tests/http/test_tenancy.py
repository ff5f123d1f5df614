"""Tests of tenancy: access rights and usable cached prompts depend on the user."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import WebSocketRoute
from starlette.testclient import TestClient, WebSocketDenialResponse

from bridle.http import HttpSettings, create_app
from bridle.lmtp.server import websocket_front
from bridle.serving import ModelRegistry
from bridle.serving.tenancy.keys import KeyStore
from tests.http.harness import calls, every_route
from tests.serving.fakes import fake_model

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
]


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_requests_carry_their_tenant(path: str, body: dict[str, Any], tmp_path: Path) -> None:
    model, keys = fake_model(), KeyStore(tmp_path / "keys.db")
    client = TestClient(create_app(ModelRegistry([model]), keys=keys))
    for user in ("alice", "bob"):
        headers = {"authorization": f"Bearer {keys.add(user)}"}
        client.post(path, json=body, headers=headers).raise_for_status()
    keys.close()
    requests = model.client.requests  # type: ignore[attr-defined]
    assert [request.tenant for request in requests] == ["alice", "bob"]


#: Routes for admins alone, with a body that is one. A new one is to be listed here.
ADMIN_ROUTES: dict[tuple[str, str], dict[str, Any] | None] = {
    ("GET", "/v1/status"): None,
    ("GET", "/v1/policies"): None,
    ("POST", "/v1/policies/reload"): None,
    ("POST", "/v1/models/load"): {"model": "fake"},
    ("POST", "/v1/models/unload"): {"model": "fake"},
    ("POST", "/v1/adapters"): {"name": "a"},
    ("DELETE", "/v1/adapters/{name:path}"): None,
    ("POST", "/v1/control_vectors"): {"name": "a"},
    ("DELETE", "/v1/control_vectors/{name}"): None,
    ("POST", "/v1/pause"): {},
    ("POST", "/v1/resume"): {},
    ("POST", "/v1/load_lora_adapter"): {"lora_name": "a", "lora_path": "a"},
    ("POST", "/v1/unload_lora_adapter"): {"lora_name": "a"},
}


def concrete(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "fake", path)


def test_without_a_key_every_route_but_health_is_closed(tmp_path: Path) -> None:
    keys = KeyStore(tmp_path / "keys.db")
    app = create_app(ModelRegistry([fake_model()]), keys=keys, fronts=[websocket_front()])
    client = TestClient(app)
    assert {path for _, path in calls(app)} >= {"/v1/completions", "/v1/models", "/metrics", "/", "/docs", "/v1/status"}
    for own, path in [*calls(app), ("GET", "/nope")]:
        for method in {own, "GET", "POST", "PUT", "DELETE", "HEAD"}:
            answer = client.request(method, concrete(path))
            if path in ("/", "/docs", "/openapi.json") and method in ("GET", "HEAD"):
                assert answer.status_code == 200 and "fake" not in answer.text
                continue
            if path == "/playground/{name}" and method in ("GET", "HEAD"):
                assert answer.status_code == 404, "the page's files are open; this is none of them"
                continue
            if path.startswith("/health") or path == "/ping":
                assert answer.status_code in (200, 405)
                continue
            assert answer.status_code == 401, path
            assert method == "HEAD" or "an API key is needed" in answer.text
    sockets = [route.path for route in every_route(app) if isinstance(route, WebSocketRoute)]
    assert sockets
    for path in sockets:
        with pytest.raises(WebSocketDenialResponse) as denied, client.websocket_connect(path):
            raise AssertionError(f"{path} was opened")
        assert denied.value.status_code == 401
    keys.close()


def test_routes_for_admins_are_for_admins(tmp_path: Path) -> None:
    """Each route is for all users or for admins, as listed here. The test finds routes without an access check, and new
    routes that are not listed."""
    keys = KeyStore(tmp_path / "keys.db")
    app = create_app(ModelRegistry([fake_model()]), keys=keys)
    client = TestClient(app)
    client.headers["api-key"] = keys.add("ann")
    assert set(ADMIN_ROUTES) <= set(calls(app))
    for method, path in calls(app):
        body = ADMIN_ROUTES.get((method, path), {})
        answer = client.request(method, concrete(path), json=body)
        assert (answer.status_code == 403) is ((method, path) in ADMIN_ROUTES), (method, path, answer.text)
    keys.close()


def test_preflights_are_answered_without_a_key(tmp_path: Path) -> None:
    keys = KeyStore(tmp_path / "keys.db")
    settings = HttpSettings(cors_origins=("http://page.example",))
    client = TestClient(create_app(ModelRegistry([fake_model()]), settings, keys))
    headers = {"origin": "http://page.example", "access-control-request-method": "POST"}
    answer = client.options("/v1/completions", headers=headers)
    assert answer.headers["access-control-allow-origin"] == "http://page.example"
    refused = client.post("/v1/completions", json={}, headers={"origin": "http://page.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "http://page.example"
    keys.close()
