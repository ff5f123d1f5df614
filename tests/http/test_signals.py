"""Tests of signals: the first drains the server, the second ends it at once, and the exit is clean in both cases."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle.errors import InvalidRequest
from bridle.http import HttpSettings, ServeSettings, serve
from bridle.http.server.listening import bind
from tests.http.small_server import small_server
from tests.waiting import PATIENCE

LONG = {"prompt": "a", "max_tokens": 4000, "seed": 1, "stream": True}  # about 400 s at the small server's slow pace


def chunks_of(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line[6:])


POLICY = """
[[policy]]
name = "letters"
kind = "pattern"
pattern = "a"
action = "replace"
replacement = "b"
"""


def test_policies_are_read_again_without_dropping_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "policies.toml"
    path.write_text(POLICY, encoding="utf-8")

    def say() -> str:
        body = {"prompt": "a", "max_tokens": 2, "seed": 1}
        return str(client.post("v1/completions", json=body).json()["choices"][0]["text"])

    with small_server(PATIENCE, path) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        assert say() == "bb"
        with client.stream("POST", "v1/completions", json=LONG) as answer:
            chunks = chunks_of(answer.iter_lines())
            text = next(chunks)["choices"][0]["text"]
            path.write_text("[[policy]]", encoding="utf-8")
            server.signal_and_wait(signal.SIGHUP, "policies not reloaded")
            assert say() == "bb"
            path.write_text(POLICY.replace('"b"', '"c"'), encoding="utf-8")
            server.signal_and_wait(signal.SIGHUP, "policies reloaded")
            assert say() == "cc"
            server.hurry()
            before = len(text)
            while len(text) < before + 300:
                text += next(chunks)["choices"][0]["text"]
        assert set(text) == {"b"}


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_the_first_signal_lets_running_requests_finish(number: int) -> None:
    with small_server(grace=PATIENCE) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        with client.stream("POST", "v1/completions", json=LONG) as answer:
            lines = answer.iter_lines()
            chunks = chunks_of(lines)
            text = next(chunks)["choices"][0]["text"]
            server.signal_and_wait(number)
            assert client.get("health/ready").status_code == 503
            assert client.get("health/live").status_code == 200
            refused = client.post("v1/completions", json={"prompt": "a", "seed": 1})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "engine_closed"
            server.hurry()
            for chunk in chunks:
                text += chunk["choices"][0]["text"]
        assert text == "a" * 4000
        assert server.process.wait() == 0


def test_the_second_signal_ends_at_once() -> None:
    with (
        small_server(grace=PATIENCE) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
        client.stream("POST", "v1/completions", json=LONG) as answer,
    ):
        next(chunks_of(answer.iter_lines()))
        server.signal_and_wait(signal.SIGINT)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait() == 0


def test_after_the_grace_period_streams_end_with_an_error() -> None:
    with small_server(grace=0.2) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        with client.stream("POST", "v1/completions", json=LONG) as answer:
            chunks = chunks_of(answer.iter_lines())
            next(chunks)
            server.process.send_signal(signal.SIGTERM)
            *_, last = chunks
        assert last["error"]["code"] == "engine_closed"
        assert server.process.wait() == 0


def test_an_idle_server_ends_at_once_having_told_how_to_use_it() -> None:
    with small_server(grace=PATIENCE) as server:
        assert server.banner[0].startswith("Serving bytes at http://127.0.0.1:")
        command = server.banner[2].strip()
        assert command.startswith(f"curl -N {server.url}v1/chat/completions -H 'Content-Type: application/json' -d '")
        body = json.loads(command.split(" -d '")[1].removesuffix("'"))
        assert (
            httpx.post(server.url + "v1/chat/completions", json=body | {"max_tokens": 2, "seed": 1}).status_code == 200
        )
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait() == 0


def test_a_taken_port_is_told_before_the_model_is_loaded() -> None:
    def load(settings: ServeSettings) -> Any:
        raise AssertionError("loaded")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequest, match=rf"cannot listen on 127.0.0.1:{port}: .*; choose another port"):
            serve(ServeSettings(port=port), load)
    with pytest.raises(InvalidRequest, match="cannot listen on host"):
        bind("no such host", 80)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ServeSettings(port=70_000), "port is 70000; must be between 0 and 65535"),
        (lambda: ServeSettings(grace_period=-1), "grace_period is -1; must be at least 0"),
        (lambda: ServeSettings(max_connections=0), "max_connections is 0; must be at least 1"),
        (lambda: HttpSettings(max_body_bytes=0), "max_body_bytes is 0; must be at least 1"),
        (lambda: HttpSettings(send_timeout=float("nan")), "send_timeout is nan; must be more than 0"),
    ],
)
def test_settings_are_checked(make: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make()
