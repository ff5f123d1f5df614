"""Tests of adapters on every HTTP route: requests choose them, answers name and list them, errors have the API's shape,
and admins load them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from bridle.http import HttpSettings, create_app
from bridle.http.metrics import metrics
from bridle.serving import AdapterSet, LoadedModel, ModelRegistry
from bridle.serving.lora.lora_config import AdapterCatalog
from bridle.serving.tenancy.keys import KeyStore
from tests.http.harness import scripted_model, serving
from tests.serving.fake_adapters import FakeHome, with_adapters, write_adapter
from tests.serving.fakes import fake_model
from tests.waiting import PATIENCE

TURN = [{"role": "user", "content": "Say it."}]
#: Routes, bodies, and where the text of an answer is.
ROUTES: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = [
    ("/v1/completions", {"prompt": "Say it.", "max_tokens": 8, "temperature": 0}, ("choices", 0, "text")),
    (
        "/v1/chat/completions",
        {"messages": TURN, "max_tokens": 8, "temperature": 0},
        ("choices", 0, "message", "content"),
    ),
    (
        "/v1/responses",
        {"input": "Say it.", "max_output_tokens": 8, "temperature": 0},
        ("output", 0, "content", 0, "text"),
    ),
    ("/v1/messages", {"messages": TURN, "max_tokens": 8, "temperature": 0}, ("content", 0, "text")),
]
NATIVE = ["/generate", "/generate_stream", "/", "/invocations"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    write_adapter(root / "later")
    write_adapter(root / "wide", rank=100)
    return root


def registry_of(model: LoadedModel, folder: Path, home: FakeHome | None = None) -> ModelRegistry:
    """Return a registry whose model has the adapters `french` and `org/german`, and may load more from a folder."""
    with_adapters(model, home)
    for name in ("french", "org/german"):
        model.adapters.add(name, str(folder / "later"))
        model.adapters.fetch(name).result()
    registry = ModelRegistry(adapters=AdapterCatalog(AdapterSet(folder=folder)))
    registry.add(model, aliases=["gpt-4"])
    return registry


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[TestClient]:
    """Yield a client of a model whose greedy text depends only on the adapter."""
    registry = registry_of(scripted_model(spread=4096), folder)
    with TestClient(create_app(registry), raise_server_exceptions=False) as client:
        yield client
    registry.close()


@pytest.fixture
def fake(folder: Path) -> tuple[TestClient, Any]:
    """Return a client of a model, and its fake engine, which records its requests."""
    model = fake_model(name="demo")
    return TestClient(create_app(registry_of(model, folder))), model.client


def _text(answer: httpx.Response, path: tuple[Any, ...]) -> str:
    assert answer.status_code == 200, answer.text
    found: Any = answer.json()
    for step in path:
        found = found[step]
    assert isinstance(found, str)
    return found


# -- chosen ------------------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize(("route", "body", "where"), ROUTES)
def test_a_request_chooses_by_model_or_by_adapter(
    http: TestClient, route: str, body: dict[str, Any], where: tuple[Any, ...]
) -> None:
    base = _text(http.post(route, json=body), where)
    french = http.post(route, json=body | {"model": "french"})
    assert french.json()["model"] == "french"
    for fields in ({"adapter": "french"}, {"model": "gpt-4", "adapter": "french"}, {"model": "", "adapter": "french"}):
        answer = http.post(route, json=body | fields)
        assert _text(answer, where) == _text(french, where) and answer.json()["model"] == "french"
    german = _text(http.post(route, json=body | {"model": "org/german"}), where)
    assert len({base, _text(french, where), german}) == 3
    for given in (("tgi", None), (None, "dummy"), ("", ""), ("gpt-4", "scripted"), (None, "gpt-4"), ("dummy", "tgi")):
        answer = http.post(route, json=body | dict(zip(("model", "adapter"), given, strict=True)))
        assert _text(answer, where) == base and answer.json()["model"] == "scripted"


def test_streams_name_the_adapter(http: TestClient) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "stream": True, "model": "french"})
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert chunks and {chunk["model"] for chunk in chunks} == {"french"}
    run = {"controller": "none", "controller_arg": "a", "max_tokens": 2, "model": "french"}
    assert '"model":"french"' in http.post("/v1/run", json=run).text


def test_a_name_may_say_whose_adapter_is_meant(fake: tuple[TestClient, Any]) -> None:
    client, engine = fake
    for name in ("demo:french", "gpt-4:french", "demo:org/german"):
        answer = client.post("/v1/completions", json={"prompt": "a", "model": name})
        assert answer.json()["model"] == name.partition(":")[2]
        client.post("/generate", json={"inputs": "a", "model": name}).raise_for_status()
    assert len({request.adapter for request in engine.requests}) == 2 and None not in engine.requests
    answer = client.post("/v1/completions", json={"prompt": "a", "model": "demo:nobody"})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "adapter_not_found"


@pytest.mark.parametrize("path", NATIVE)
def test_native_routes_choose_by_adapter_id(fake: tuple[TestClient, Any], path: str) -> None:
    client, engine = fake
    wanted = [("french", True), (None, False), ("", False), ("tgi", False), ("demo", False), ("gpt-4", False)]
    for name, _ in wanted:
        body = {"inputs": "a", "parameters": {"adapter_id": name}}
        assert client.post(path, json=body).status_code == 200
    assert [request.adapter is not None for request in engine.requests] == [is_adapter for _, is_adapter in wanted]


def test_every_way_reaches_the_engine_as_one_key(fake: tuple[TestClient, Any]) -> None:
    client, engine = fake
    for route, body, _ in ROUTES:
        client.post(route, json=body | {"model": "french"}).raise_for_status()
        client.post(route, json=body | {"adapter": "french", "stream": True}).raise_for_status()
    for fields in ({"model": "french"}, {"adapter": "french"}):
        client.post("/v1/run", json={"controller": "none", "controller_arg": "a", **fields}).raise_for_status()
    for fields in ({"model": "french"}, {"parameters": {"adapter_id": "french"}}):
        client.post("/generate", json={"inputs": "a", **fields}).raise_for_status()
    assert len({request.adapter for request in engine.requests}) == 1
    assert len(engine.requests) == 2 * len(ROUTES) + 4 and engine.requests[0].adapter is not None


def test_what_needs_only_the_tokenizer_takes_adapters_for_their_models(fake: tuple[TestClient, Any]) -> None:
    client, engine = fake
    count = {"messages": TURN, "model": "french"}
    assert client.post("/v1/messages/count_tokens", json=count).json()["input_tokens"] > 0
    assert client.get("/info", params={"model": "french"}).json()["model_id"] == "demo"
    assert not engine.requests


# -- refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{"adapter": "nobody"}, {"model": "nobody"}, {"model": "nobody", "adapter": "french"}]
)
def test_an_unknown_name_is_never_the_model_itself(fake: tuple[TestClient, Any], fields: dict[str, str]) -> None:
    client, engine = fake
    for route, body, _ in ROUTES:
        for stream in (False, True):
            answer = client.post(route, json=body | fields | {"stream": stream})
            error = answer.json()["error"]
            assert answer.status_code == 404 and "'nobody'" in error["message"] and "'french'" in error["message"]
            assert error["param"] == ("adapter" if fields == {"adapter": "nobody"} else "model")
    run = client.post("/v1/run", json={"controller": "none", "controller_arg": "a", **fields})
    assert run.status_code == 404 and "'nobody'" in run.json()["message"]
    assert not engine.requests


@pytest.mark.parametrize("path", NATIVE)
def test_native_routes_refuse_in_their_own_shape(fake: tuple[TestClient, Any], path: str) -> None:
    client, engine = fake
    for adapter, status in (("nobody", 404), ("wide", 422)):
        answer = client.post(path, json={"inputs": "a", "parameters": {"adapter_id": adapter}})
        assert answer.status_code == status and answer.json()["error_type"] == "validation"
        assert answer.json()["error"].startswith("Input validation error: ")
    assert not engine.requests


def test_what_lorax_would_merge_or_fetch_is_refused(fake: tuple[TestClient, Any]) -> None:
    client, engine = fake
    merged = {"adapter_parameters": {"ids": ["french", "org/german"], "weights": [1, 1]}}
    for fields, reason in (
        (merged, "cannot be merged"),
        ({"adapter_id": "french", "adapter_source": "s3"}, "hub or local"),
    ):
        answer = client.post("/generate", json={"inputs": "a", "parameters": fields})
        assert answer.status_code == 422 and reason in answer.json()["error"]
    assert not engine.requests
    plain = {"adapter_id": "french", "adapter_source": "hub", "adapter_parameters": None, "api_token": "x"}
    client.post("/generate", json={"inputs": "a", "parameters": plain}).raise_for_status()
    assert engine.requests[0].adapter is not None


def test_messages_refuse_in_anthropics_shape(fake: tuple[TestClient, Any]) -> None:
    client, _ = fake
    answer = client.post("/v1/messages", json={"messages": TURN, "max_tokens": 4, "adapter": "nobody"})
    assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == "not_found_error"


def test_what_cannot_be_used_is_refused_and_tells_no_path(fake: tuple[TestClient, Any], folder: Path) -> None:
    client, engine = fake
    answer = client.post("/v1/completions", json={"prompt": "a", "model": "wide"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "adapter_refused"
    assert "the rank is 100" in answer.text and str(folder) not in answer.text
    states = {row["id"]: row["state"] for row in client.get("/v1/adapters").json()["data"]}
    assert states == {"french": "host", "org/german": "host", "later": "loadable", "wide": "failed"}
    row = client.get("/v1/adapters/wide").json()
    assert row["state"] == "failed" and "the rank is 100" in row["error"]
    assert client.get("/v1/adapters/later").json()["state"] == "loadable"
    assert client.get("/v1/adapters/nobody").status_code == 404
    assert not engine.requests


# -- listed ------------------------------------------------------------------------------------------------------


def test_models_and_info_list_adapters(fake: tuple[TestClient, Any]) -> None:
    client, _ = fake
    rows = {row["id"]: row for row in client.get("/v1/models").json()["data"]}
    assert {name: row["parent"] for name, row in rows.items()} == {
        "demo": None,
        "gpt-4": None,
        "french": "demo",
        "org/german": "demo",
        "later": "demo",
        "wide": "demo",
    }
    assert [rows[name]["state"] for name in ("demo", "french", "later")] == ["loaded", "loaded", "loadable"]
    for name in ("org/german", "later"):
        assert client.get(f"/v1/models/{name}").json() == rows[name]
    assert client.get("/v1/models/nobody").status_code == 404
    assert client.get("/info").json()["adapters"] == ["french", "org/german"]


def test_counts_by_adapter_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_ADAPTER_LABELS", 4)
    model = fake_model(name="demo")
    registry = registry_of(model, folder)
    client = TestClient(create_app(registry))
    for number in range(7):
        model.adapters.add(f"a{number}", str(folder / "later"))
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "model": f"a{number}"}).raise_for_status()
    client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "model": "a0"}).raise_for_status()
    client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).raise_for_status()
    lines = [
        line
        for line in client.get("/metrics").text.splitlines()
        if line.startswith("bridle_http_adapter_requests_total{")
    ]
    assert len(lines) == 5
    assert 'bridle_http_adapter_requests_total{adapter="a0",model="demo"} 2.0' in lines
    assert 'bridle_http_adapter_requests_total{adapter="(others)",model="demo"} 3.0' in lines


# -- loaded and unloaded -----------------------------------------------------------------------------------------


def test_admins_load_and_unload_users_list(folder: Path, tmp_path: Path) -> None:
    keys = KeyStore(tmp_path / "keys.db")
    client = TestClient(create_app(registry_of(fake_model(name="demo"), folder), keys=keys))
    user = {"authorization": f"Bearer {keys.add('ann')}"}
    admin = {"authorization": f"Bearer {keys.add('root', is_admin=True)}"}
    body = {"name": "mine", "source": "later"}
    assert client.post("/v1/adapters", json=body).status_code == 401
    assert client.get("/v1/adapters").status_code == 401
    for method, path, sent in (
        ("POST", "/v1/adapters", body),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "later"}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "french"}),
        ("DELETE", "/v1/adapters/french", None),
    ):
        assert client.request(method, path, json=sent, headers=user).status_code == 403
    made = client.post("/v1/adapters", json=body, headers=admin)
    assert made.status_code == 201 and made.json()["source"] == str(folder / "later") and made.json()["state"] == "host"
    shown = client.get("/v1/adapters/mine", headers=user).json()
    assert shown["rank"] == 2 and shown["targets"] == ["q_proj"] and "source" not in shown and "error" not in shown
    assert client.post("/v1/completions", json={"prompt": "a", "model": "mine"}, headers=user).status_code == 200
    assert client.delete("/v1/adapters/mine", headers=admin).json()["deleted"] is True
    assert client.post("/v1/completions", json={"prompt": "a", "model": "mine"}, headers=user).status_code == 404
    assert client.delete("/v1/adapters/mine", headers=admin).json()["error"]["code"] == "adapter_not_found"
    keys.close()


def test_vllms_words_do_the_same(fake: tuple[TestClient, Any], folder: Path) -> None:
    client, engine = fake
    loading = {"lora_name": "mine", "lora_path": str(folder / "later")}
    assert client.post("/v1/load_lora_adapter", json=loading).text == "Success: LoRA adapter 'mine' added successfully."
    assert client.post("/v1/load_lora_adapter", json=loading).status_code == 400
    assert client.post("/v1/load_lora_adapter", json=loading | {"load_inplace": True}).status_code == 200
    client.post("/v1/completions", json={"prompt": "a", "model": "mine"}).raise_for_status()
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 200
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 404
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    "source", ["/etc", "../..", "later/..", "~", "org/name", "file:///etc/passwd", "later\x00", "", "x" * 501]
)
def test_no_path_from_the_network_is_followed(fake: tuple[TestClient, Any], source: str) -> None:
    client, _ = fake
    before = client.get("/v1/adapters").json()
    for path, body in (
        ("/v1/adapters", {"name": "mine", "source": source}),
        ("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": source}),
    ):
        assert client.post(path, json=body).status_code == 400
    assert client.get("/v1/adapters").json() == before


def test_a_load_waits_for_itself_alone(folder: Path) -> None:
    home = FakeHome()
    registry = registry_of(fake_model(name="demo"), folder, home)
    home.is_held = True
    home.began.clear()
    ask = {"prompt": "a", "max_tokens": 3}
    with serving(registry, HttpSettings(max_requests=2)) as url, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(httpx.post, url + "/v1/completions", json=ask | {"model": "later"}, timeout=PATIENCE)
        assert home.began.wait(PATIENCE)
        assert httpx.post(url + "/v1/completions", json=ask | {"model": "french"}).status_code == 200
        assert httpx.post(url + "/v1/completions", json=ask).status_code == 200
        (key,) = home.waiting
        home.release(key)
        assert waiting.result(PATIENCE).json()["model"] == "later"


def test_who_waits_too_long_is_told(folder: Path) -> None:
    home = FakeHome()
    registry = registry_of(fake_model(name="demo"), folder, home)
    home.is_held = True
    client = TestClient(create_app(registry, HttpSettings(load_timeout=0.02)))
    with client:
        answer = client.post("/v1/completions", json={"prompt": "a", "model": "later"})
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "model_unavailable"
        home.release(next(iter(home.waiting)))
