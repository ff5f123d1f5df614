"""Who asks decides whose cached prompts may be used, and who may ask at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from bridle.http import HttpSettings, create_app
from bridle.service import ModelRegistry
from bridle.service.keys import KeyStore
from tests.service.fakes import fake_model

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


def test_without_a_key_every_route_but_health_is_closed(tmp_path: Path) -> None:
    keys = KeyStore(tmp_path / "keys.db")
    app = create_app(ModelRegistry([fake_model()]), keys=keys)
    client = TestClient(app)
    documented = set(app.openapi()["paths"])
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics"} <= documented
    paths = documented | {route.path for route in app.routes if isinstance(route, Route)} | {"/", "/nope"}
    for path in paths:
        for method in ("GET", "POST", "DELETE"):
            answer = client.request(method, path.replace("{name}", "fake"))
            if path.startswith("/health"):
                assert answer.status_code in (200, 405)
            else:
                assert answer.status_code == 401, path
                assert answer.json()["error"]["code"] == "unauthorized"
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
