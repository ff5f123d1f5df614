"""`bridle top` shows a server's state, and `/v1/status` reports it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from starlette.testclient import TestClient

from bridle.cli import main
from bridle.cli.top_view import frame, trouble
from bridle.engine.client import EventStream
from bridle.http import create_app
from bridle.outputs import PromptEvent, PromptProgress
from bridle.serving import ModelRegistry
from bridle.serving.lifecycle.request_record import RequestRecord
from bridle.serving.tenancy.keys import KeyStore
from tests.engine.support import make_request
from tests.http.harness import scripted_model, served
from tests.serving.fakes import fake_model


def status(**changes: Any) -> dict[str, Any]:
    """Return the status of an idle server with one engine."""
    engine = {"num_running": 0, "num_waiting": 0, "num_blocks": 64, "num_free_blocks": 64, "num_sampled_tokens": 0}
    model = {
        "name": "demo",
        "state": "loaded",
        "is_healthy": True,
        "device": "cpu",
        "max_num_seqs": 16,
        "control": None,
        "engine": engine | changes.pop("engine", {}),
    }
    flight = {"requests": 0, "max_requests": 512, "refused": 0}
    plain = {"version": "1", "time": 100.0, "uptime": 50.0, "is_draining": False, "in_flight": flight}
    return plain | {"models": [model | changes.pop("model", {})], "num_requests": 0, "requests": []} | changes


def row(**changes: Any) -> dict[str, Any]:
    plain = {"route": "POST /v1/completions", "user": "ann", "model": "demo", "adapter": None, "controller": None}
    plain |= {"constraint": "regex", "priority": -2, "state": "running", "age": 2.0}
    return plain | {"prompt_tokens": 10, "output_tokens": 20} | changes


def shown(*args: Any) -> str:
    console = Console(width=160, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(frame(*args) if isinstance(args[-1], str) and len(args) == 3 else args[0])
    return capture.get()


def test_a_frame_tells_queue_batch_cache_and_control() -> None:
    engine = {"num_running": 3, "num_waiting": 2, "num_free_blocks": 16, "num_prompt_tokens": 100}
    control = {"is_up": False, "restarts": 2}
    text = shown(status(engine=engine | {"num_cached_tokens": 25}, model={"control": control}), None, "here")
    for part in ("3 running, 2 waiting", "48 of 64 blocks", "25% of prompts", "down, 2 restarts", "no requests"):
        assert part in text


def test_users_are_listed_with_their_blocks() -> None:
    held = {f"user{number}": number for number in range(1, 10)}
    assert "blocks of user9: 9, user8: 8, " in (text := shown(status(model={"kv_blocks": held}), None, "here"))
    assert "user2: 2, 1 more" in text and "user1:" not in text
    assert "blocks of" not in shown(status(), None, "here")


def test_kv_below_the_cache_is_shown_where_there_is_some() -> None:
    stored = {"num_blocks_in_store": 40, "num_restored_tokens": 320}
    assert "40 blocks on disk, 320 tokens read" in shown(status(engine=stored), None, "here")
    host = {"num_host_blocks": 9, "num_host_bytes": 64 << 20}
    assert "9 blocks in host memory (64 MiB), 40 blocks on disk" in shown(status(engine=stored | host), None, "here")
    assert "stored" not in shown(status(engine={"num_blocks_in_store": 0}), None, "here")


def test_the_runtime_of_policies_is_told_apart() -> None:
    both = {"control": {"is_up": True, "restarts": 0}, "policy_control": {"is_up": False, "restarts": 3}}
    assert "up, of policies down, 3 restarts, 0 outputs wait" in shown(status(model=both), None, "here")
    assert "of policies" not in shown(status(model=both | {"policy_control": None}), None, "here")


def test_speeds_are_since_the_look_before() -> None:
    before = status(engine={"num_sampled_tokens": 100, "num_steps": 10, "step_seconds": 1.0})
    after = status(time=102.0, engine={"num_sampled_tokens": 150, "num_steps": 20, "step_seconds": 1.5})
    text = shown(after, before, "here")
    assert "25.0 tokens/s sampled" in text and "50.0 ms a step" in text
    assert "3.0 tokens/s sampled" in shown(after, None, "here")  # 150 in 50 seconds


def test_requests_are_listed_with_what_steers_them() -> None:
    text = shown(status(requests=[row(), row(user="bob", controller="pyctrl")], num_requests=9), None, "here")
    line = next(line for line in text.splitlines() if "ann" in line)
    assert " ".join(line.split()) == "2.0 s running ann demo regex -2 10 20 10.0 POST /v1/completions"
    assert "pyctrl" in text and "7 more" in text


def test_prompts_under_way_tell_how_far_they_are() -> None:
    half_way = row(state="prompt", prompt_tokens=5000, computed_prompt_tokens=900, cached_prompt_tokens=100)
    engine = {"num_running": 3, "num_prefilling": 2}
    text = shown(status(requests=[half_way], num_requests=1, engine=engine), None, "here")
    assert "1000/5000" in text and "3 running (2 of them prompts), 0 waiting" in text


def test_nothing_that_a_server_says_steers_the_terminal() -> None:
    evil = "a\x1b]0;owned\x07\x9b31m[red]b"
    text = shown(status(requests=[row(user=evil, route=evil, controller=evil)], num_requests=1), None, evil)
    assert not set(text) & {"\x1b", "\x07", "\x9b"}
    assert "[red]b" in text


def test_models_that_are_not_loaded_and_servers_that_are_away() -> None:
    passing = {"name": "later", "state": "loadable"}
    assert "not loaded" in shown(status(models=[passing]), None, "here")
    assert "cannot be reached" in shown(trouble(status(), "cannot be reached", "here"))


# -- against a server ----------------------------------------------------------------------------------------


def test_top_prints_once_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with served(scripted_model()) as url:
        assert main(["top", "--once", "--json", "--base-url", url]) == 0
        told = json.loads(capsys.readouterr().out.splitlines()[-1])  # after the server's log
        assert told["models"][0]["name"] == "scripted" and told["models"][0]["engine"]["num_running"] == 0
        assert main(["top", "--once", "--base-url", url]) == 0
        assert "scripted" in capsys.readouterr().out


def test_an_interval_has_limits_and_a_server_must_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--interval", "0"]) == 2
    assert "must be between 0.1 and 3600" in capsys.readouterr().err
    assert main(["top", "--once", "--base-url", "http://127.0.0.1:9"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_status_is_for_admins(tmp_path: Path) -> None:
    keys = KeyStore(tmp_path / "keys.db")
    client = TestClient(create_app(ModelRegistry([fake_model()]), keys=keys))
    user, admin = keys.add("ann"), keys.add("root", is_admin=True)
    assert client.get("/v1/status", headers={"api-key": user}).status_code == 403
    assert client.get("/v1/status", headers={"api-key": admin}).status_code == 200
    keys.close()


def test_status_tells_of_live_requests_and_forgets_them() -> None:
    model = fake_model()
    app = create_app(ModelRegistry([model]))
    client = TestClient(app)
    client.post("/v1/completions", json={"prompt": "a"}).raise_for_status()
    state = app.state.http
    assert state.live == {}
    for number in range(120):
        state.live[str(number)] = RequestRecord(id=str(number), route="LMTP GENERATE", began=float(number))
    told = client.get("/v1/status").json()
    assert told["num_requests"] == 120 and len(told["requests"]) == 100
    assert [one["id"] for one in told["requests"][:3]] == ["0", "1", "2"]


def test_status_tells_how_far_a_prompt_is() -> None:
    app = create_app(ModelRegistry([fake_model()]))
    story, stream = RequestRecord(id="r"), EventStream("r", lambda request_id: None)
    app.state.http.live["r"] = story
    story.submit(make_request([1] * 50))
    story.streams.append(stream)
    counts = []
    for event in (None, PromptProgress("r", 0, 20, 10), PromptEvent("r", 0, (1,) * 50, 10)):
        if event is not None:
            stream.put([event])
        (told,) = TestClient(app).get("/v1/status").json()["requests"]
        counts.append((told["state"], told["computed_prompt_tokens"], told["cached_prompt_tokens"]))
    assert counts == [("waiting", 0, 0), ("prompt", 20, 10), ("prompt", 40, 10)]
