"""Tests of several models on one server: every route finds them by name, waiting requests load them, and admins manage
them."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bridle.http import HttpSettings
from bridle.serving.tenancy.keys import KeyStore
from tests.http.model_server import server_of
from tests.serving.loaders import FakeLoader
from tests.waiting import PATIENCE

ASK = {"prompt": "a", "max_tokens": 3}
BODIES = [
    ("/v1/completions", ASK),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/run", {"controller": "none", "controller_arg": "a"}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_every_route_loads_what_a_request_names(path: str, body: dict[str, Any]) -> None:
    with server_of(FakeLoader({"good": 1, "org/late": 1})) as (url, registry):
        for name in ("org/late", "good"):
            answer = httpx.post(url + path, json=body | {"model": name})
            assert answer.status_code == 200
            assert name in answer.text
        assert httpx.post(url + path, json=body | {"model": "bogus"}).status_code == 404
        assert all(slot.num_leases == 0 for slot in registry.slots)


def test_the_list_of_models_tells_the_truth() -> None:
    loader = FakeLoader({"good": 1, "org/late": 1, "org/other": 1})
    with server_of(loader, aliases=(("alias", "org/late"),)) as (url, _), ThreadPoolExecutor(1) as threads:
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)

        def states() -> dict[str, str]:
            return {model.id: model.state for model in client.models.list()}  # type: ignore[attr-defined]

        at_first = {"good": "loaded", "alias": "loadable", "org/late": "loadable", "org/other": "loadable"}
        assert states() == at_first
        assert client.models.retrieve("org/late").max_model_len is None  # type: ignore[attr-defined]
        loader.began.clear()
        loader.go.clear()
        asking = threads.submit(client.completions.create, model="alias", prompt="a", max_tokens=3)
        assert loader.began.wait(PATIENCE)
        assert states() == at_first | {"alias": "loading", "org/late": "loading"}
        row = httpx.get(url + "/v1/models/org/late").json()
        assert row["loading"] == {"stage": "reading weights", "share": 0.5}
        assert client.completions.create(model="good", prompt="a", max_tokens=3).choices[0].text == "hel"
        assert httpx.get(url + "/health/ready").status_code == 200
        loader.go.set()
        assert asking.result(PATIENCE).model == "org/late"
        assert states() == at_first | {"alias": "loaded", "org/late": "loaded"}


def test_who_waits_for_a_model_gets_a_clear_error_at_the_deadline() -> None:
    loader = FakeLoader({"good": 1, "org/late": 1})
    with server_of(loader, HttpSettings(load_timeout=0.05)) as (url, _):
        loader.go.clear()
        answer = httpx.post(url + "/v1/completions", json=ASK | {"model": "org/late"})
        loader.go.set()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "model_unavailable"
    assert "'org/late' is not loaded after 0.05 s" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "1"


def test_who_waits_counts_as_in_flight() -> None:
    loader = FakeLoader({"good": 1, "org/late": 1})
    with server_of(loader, HttpSettings(max_requests=1)) as (url, _), ThreadPoolExecutor(1) as threads:
        loader.began.clear()
        loader.go.clear()
        waiting = threads.submit(
            httpx.post, url + "/v1/completions", json=ASK | {"model": "org/late"}, timeout=PATIENCE
        )
        assert loader.began.wait(PATIENCE)
        assert httpx.post(url + "/v1/completions", json=ASK | {"model": "org/late"}).status_code == 429
        loader.go.set()
        assert waiting.result(PATIENCE).status_code == 200


def test_a_client_that_leaves_ends_its_wait() -> None:
    """After the client disconnected, the model that waits for memory is no longer loaded for its request."""
    loader = FakeLoader({"good": 1, "org/big": 80, "org/late": 80})
    with server_of(loader) as (url, registry):
        host, port = url.removeprefix("http://").split(":")
        data = json.dumps({"model": "org/big", "prompt": "a"}).encode()
        with httpx.Client(base_url=url, timeout=PATIENCE) as client:
            client.post("/v1/models/load", json={"model": "org/late"}).raise_for_status()
            registry.slot_of("org/late").num_leases += 1  # somebody uses it for long
            with socket.create_connection((host, int(port))) as connection:
                head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                connection.sendall(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
                while client.get("/v1/models/org/big").json()["state"] != "loading":
                    pass
            while client.get("/v1/models/org/big").json()["state"] == "loading":
                pass
            assert client.get("/v1/models/org/late").json()["state"] == "loaded"
    assert loader.loads == ["good", "org/late"]


def test_admins_load_and_unload(tmp_path: Path) -> None:
    keys = KeyStore(tmp_path / "keys.db")
    admin, user = keys.add("root", is_admin=True), keys.add("ann")
    with server_of(FakeLoader({"good": 1, "org/late": 1}), keys=keys) as (url, registry):

        def post(verb: str, name: str, key: str | None) -> httpx.Response:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return httpx.post(f"{url}/v1/models/{verb}", json={"model": name}, headers=headers)

        assert [post("load", "org/late", key).status_code for key in (None, user)] == [401, 403]
        assert [post("unload", "good", key).status_code for key in (None, user)] == [401, 403]
        assert post("load", "org/late", admin).json()["state"] == "loaded"
        assert post("unload", "org/late", admin).json()["state"] == "loadable"
        assert post("load", "../good", admin).status_code == 404
        registry.slot_of("good").num_leases += 1
        refused = post("unload", "good", admin)
        assert refused.status_code == 409
        assert refused.json()["error"]["message"] == "the model 'good' cannot be unloaded: 1 requests use it"
    keys.close()


def test_a_model_stays_while_a_stream_is_read() -> None:
    with server_of(FakeLoader({"good": 1, "org/late": 80}, is_endless=True)) as (url, registry):
        body = ASK | {"model": "org/late", "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()  # closed when it goes, so it is kept
            next(lines)
            assert registry.slot_of("org/late").num_leases == 1
            assert httpx.post(url + "/v1/models/unload", json={"model": "org/late"}).status_code == 409
        while registry.slot_of("org/late").num_leases:  # the server notices that the client left
            pass
        assert httpx.post(url + "/v1/models/unload", json={"model": "org/late"}).json()["state"] == "loadable"
