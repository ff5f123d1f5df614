"""Tests that each request ends with an error that advises a retry, and the engine restarts, if it dies, hangs or loses
its device."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bridle.config import EngineConfig
from bridle.errors import DeviceLost, EngineFailed
from bridle.lmtp.client import RetryPolicy, SyncClient
from bridle.lmtp.server import LmtpSettings, websocket_front
from bridle.serving.models import engine_supervisor
from bridle.serving.models.engine_supervisor import RestartPolicy
from tests.control_vectors.kit import directions
from tests.http.faulty_server import FaultyServer, faulty_server, once, raising
from tests.http.harness import scripted_model
from tests.waiting import PATIENCE, until

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6}


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_supervisor, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(engine_supervisor, "MAX_PAUSE", 0.05)


@pytest.mark.parametrize("error", [SystemExit("killed"), DeviceLost("CUDA error: an illegal memory access")])
def test_a_dead_engine_comes_back(error: BaseException) -> None:
    with faulty_server() as server:
        before = server.post().json()["choices"][0]["text"]
        server.fault = once(raising(error))
        refused = server.post()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert server.post().json()["choices"][0]["text"] == before
        server.until_healthy()
        assert server.num_loads == 2


def test_control_vectors_outlive_their_engine() -> None:
    with faulty_server() as server:
        model = server.registry.slot_of("demo").model
        assert model is not None
        model.require_control_vectors().put("loud", directions(6, 256, 1))
        before = server.post(control_vectors={"loud": 1.0}).json()["choices"][0]["text"]
        assert before != server.post().json()["choices"][0]["text"]
        server.fault = once(raising(SystemExit("killed")))
        assert server.post().status_code == 503
        assert server.post(control_vectors={"loud": 1.0}).json()["choices"][0]["text"] == before


def test_a_request_right_after_the_fault_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request does not reach the dead engine, even if the supervisor has not noticed the fault yet."""
    monkeypatch.setattr(engine_supervisor, "LOOK_SECONDS", 3600.0)
    with faulty_server() as server:
        server.fault = once(raising(SystemExit("killed")))
        assert server.post().status_code == 503
        assert server.post().status_code == 200


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 6}),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"model": "demo", "input": "Hello"}),
        ("/v1/messages", {"model": "demo"} | CHAT),
        ("/api/generate", {"model": "demo", "prompt": "Hello", "stream": False}),
        ("/generate", {"inputs": "Hello"}),
    ],
)
def test_each_api_says_to_try_again(path: str, body: dict[str, object], shared: FaultyServer) -> None:
    shared.until_healthy()
    shared.fault = once(raising(SystemExit("killed")))
    answer = httpx.post(shared.url + path, json=body, timeout=PATIENCE)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    if path == "/v1/messages":
        assert answer.json()["error"]["type"] == "overloaded_error"


class AtOnce(RestartPolicy):
    """A policy that restarts the engine without a pause after any number of failures."""

    def pause(self, num_faults: int) -> float:
        return 0.0


@pytest.fixture(scope="module")
def shared() -> Iterator[FaultyServer]:
    with faulty_server(AtOnce(max_restarts=100), fronts=(websocket_front(LmtpSettings()),)) as server:
        yield server


def test_an_lmtp_client_is_told_and_tries_again(shared: FaultyServer) -> None:
    shared.until_healthy()
    address = shared.url.removeprefix("http://")
    with SyncClient(address, "demo", patience=RetryPolicy(retries=0)) as client:
        shared.fault = once(raising(SystemExit("killed")))
        with pytest.raises(EngineFailed):
            list(client.generate("Once upon a time", max_tokens=6))
    shared.until_healthy()
    with SyncClient(address, "demo") as client:
        shared.fault = once(raising(SystemExit("killed")))
        assert len(list(client.generate("Once upon a time", max_tokens=6, ignore_eos=True))) == 6


def test_a_stream_ends_with_the_error(shared: FaultyServer) -> None:
    shared.until_healthy()
    calls = 0

    def third() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise SystemExit("killed")

    shared.fault = third
    body = {"prompt": "Once", "max_tokens": 50, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", shared.url + "/v1/completions", json=body, timeout=PATIENCE) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert events[0]["choices"]
    assert events[-1]["error"]["code"] == "engine_failed"
    shared.until_healthy()  # its new engine's thread belongs to no other test


def test_a_step_that_hangs_ends_its_requests() -> None:
    go = threading.Event()
    with faulty_server(RestartPolicy(watchdog_timeout=0.5)) as server:
        before = server.post().json()["choices"][0]["text"]
        server.fault = once(go.wait)
        answer = server.post()
        assert answer.status_code == 503
        assert "hung in a step for more than 0.5 s" in answer.text
        assert server.post().json()["choices"][0]["text"] == before
        go.set()


def test_health_tells_of_a_restart() -> None:
    go, began = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        assert go.wait(PATIENCE)

    with faulty_server() as server:
        server.on_load = wait
        server.fault = once(raising(SystemExit()))
        assert server.post().status_code == 503
        assert began.wait(PATIENCE)
        health = server.health()
        assert health.status_code == 503
        assert health.json() == {"status": "restarting the engine of demo"}
        assert httpx.get(server.url + "/health/live", timeout=PATIENCE).status_code == 200
        go.set()
        server.until_healthy()


def test_the_server_gives_up() -> None:
    with faulty_server(RestartPolicy(max_restarts=1)) as server:
        server.fault = raising(SystemExit("killed"))
        assert server.post().status_code == 503
        until(lambda: server.num_loads == 2, "the restart")
        server.until_healthy()
        assert server.post().status_code == 503
        server.thread.join(PATIENCE)
        assert "the engine of 'demo' failed after 1 restarts; the server ends" in str(server.failure)


def test_a_server_of_two_models_gives_up_one() -> None:
    with faulty_server(RestartPolicy(max_restarts=0)) as server:
        server.registry.add(scripted_model(name="other"))
        server.fault = raising(SystemExit("killed"))
        assert server.post(model="demo").status_code == 503
        until(lambda: "demo failed too often" in server.health().text, "that health names the model")
        refused = server.post(model="demo")
        assert refused.status_code == 503
        assert "the operator has to start the server again" in refused.text
        assert server.post(model="other").status_code == 200
        assert server.health().status_code == 503
        assert server.failure is None


def test_a_load_that_fails_is_tried_again() -> None:
    with faulty_server() as server:
        server.on_load = once(raising(RuntimeError("no memory")))
        server.fault = once(raising(SystemExit("killed")))
        assert server.post().status_code == 503
        server.until_healthy()
        assert server.post().status_code == 200


def test_stored_kv_is_found_again(tmp_path: Path) -> None:
    engine = EngineConfig(kv_store=str(tmp_path), kv_store_bytes=64 << 20)
    prompt = "Once upon a time there was a little girl. " * 8
    with faulty_server(engine=engine) as server:
        before = server.post(prompt=prompt).json()
        stored = server.registry.default.client
        until(lambda: stored.statistics().num_blocks_in_store, "that blocks are stored")
        server.fault = once(raising(SystemExit("killed")))
        assert server.post(prompt="x").status_code == 503
        server.until_healthy()
        after = server.post(prompt=prompt).json()
        assert after["choices"][0]["text"] == before["choices"][0]["text"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_tools_forget_an_engine_that_failed() -> None:
    with faulty_server() as server:
        server.fault = once(raising(SystemExit("killed")))
        assert server.post().status_code == 503
        server.until_healthy()
        until(lambda: len(server.tools.watching) == 1, "that one engine watches the tools")
    assert server.tools.watching == set()
