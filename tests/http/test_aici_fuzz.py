"""Any request to the AICI routes gets a complete stream or an error, and all resources of the request are freed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from tests.aici.guests import END, SHOW_MODULE_ARGUMENT, TRAP, force, guest2, result, splice
from tests.http.controlled import controlled_model, events_of, ids, pick
from tests.http.harness import local_client
from tests.http.json_strategies import JSON, SMALL

MODULES = {
    "steady": guest2([[SHOW_MODULE_ARGUMENT, *pick("a")], pick("b"), END]),
    "rewinding": guest2([force(ids("wrong")), force(ids("right"), backtrack=3), END]),
    "forking": guest2([[result({"branches": [splice(ids("l")), splice(ids("r"))]})], pick("x"), END]),
    "trapping": guest2([pick("a"), [TRAP]]),
}
NAMES = st.sampled_from(["none", *MODULES])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.text(max_size=12) | JSON,
    "model": st.just("scripted") | JSON,
    "temperature": st.floats(0, 2) | JSON,
    "top_p": st.floats(0, 1) | JSON,
    "top_k": SMALL,
    "max_tokens": SMALL,
}
BODIES = st.fixed_dictionaries({"controller": NAMES | JSON, "controller_arg": JSON}, optional=FIELDS)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with controlled_model(tmp_path_factory.mktemp("store")) as model, local_client(model) as client:
        for name, wasm in MODULES.items():
            module = client.post("/v1/controllers", content=wasm).json()["module_id"]
            client.post("/v1/controllers/tags", json={"module_id": module, "tags": [name]}).raise_for_status()
        yield client


def check(client: TestClient, path: str, content: bytes) -> None:
    answer = client.post(path, content=content)
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, (content, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    elif path == "/v1/run":
        first, *runs, done = events_of(iter(answer.text.splitlines()))
        assert (first["object"], done) == ("initial-run", "[DONE]")
        assert all(fork["finish_reason"] for fork in runs[-1]["forks"]), (content, answer.text)
    admission = client.app.state.http.admission  # type: ignore[attr-defined]
    assert (admission.num_requests, admission.num_tokens) == (0, 0)


@given(BODIES)
def test_no_run_body_is_a_bug(client: TestClient, body: dict[str, Any]) -> None:
    check(client, "/v1/run", json.dumps(body).encode())


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_bodies_that_are_anything(client: TestClient, content: bytes) -> None:
    for path in ("/v1/run", "/v1/controllers/tags"):
        check(client, path, content)


@given(st.binary(max_size=60).map(lambda data: b"\0asm\1\0\0\0" + data) | st.binary(max_size=60))
def test_modules_that_are_anything(client: TestClient, content: bytes) -> None:
    check(client, "/v1/controllers", content)


@given(st.fixed_dictionaries({"module_id": JSON | st.just("f" * 64), "tags": JSON | st.lists(st.text(max_size=60))}))
def test_tags_that_are_anything(client: TestClient, body: dict[str, Any]) -> None:
    check(client, "/v1/controllers/tags", json.dumps(body).encode())
