"""Tests of LMTP on the port of the HTTP server: access, the meaning of `/`, large messages, and two processes."""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from bridle.http.app import create_app
from bridle.http.server.run import uvicorn_config
from bridle.http.settings import ServeSettings
from bridle.lmtp import Client
from bridle.lmtp.server import LmtpServer, LmtpSettings, websocket_front
from bridle.lmtp.server.websocket import LmtpEndpoint
from bridle.serving import ModelRegistry
from bridle.serving.lifecycle.request_lifecycle import AppState
from bridle.serving.tenancy.keys import KeyStore
from bridle.serving.tenancy.loop_throttle import MAX_USELESS
from bridle.serving.tenancy.socket_tickets import MAX_PER_USER, TICKET_SECONDS
from tests.command_server import PipedCommand
from tests.http.harness import NAME, scripted_model, served
from tests.waiting import PATIENCE

SECONDS = PATIENCE


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    settings = LmtpSettings(path="/deep/lmtp", allowed_origins=("https://friend.example",))
    with served(scripted_model(), fronts=[websocket_front(settings)]) as url:
        yield url.removeprefix("http://")


def open_socket(address: str, path: str = "/", **options: Any) -> ClientConnection:
    return connect(f"ws://{address}{path}", max_size=None, open_timeout=SECONDS, compression=None, **options)


def ask(socket: ClientConnection, message: str) -> list[Any]:
    """Send a request, and return the objects of its stream."""
    socket.send(message)
    found: list[Any] = []
    while not found or not (found[-1].get("finish_reason") or "error" in found[-1] or "model_info" in found[-1]):
        found += json.loads(str(socket.recv(SECONDS)).partition(" ")[2])
    return found


GENERATE = f'GENERATE {{"model": "{NAME}", "prompt": [5, 6], "stream_id": 1, "max_tokens": 3, "temperature": 0}}'


@pytest.mark.parametrize("path", ["/", "/deep/lmtp", "/?ticket=unneeded"])
def test_an_upgrade_is_lmtp(address: str, path: str) -> None:
    with open_socket(address, path) as socket:
        socket.send(b"GENERATE {}")  # binary frames say nothing
        assert len(ask(socket, GENERATE)) == 3


def test_anything_else_keeps_its_meaning(address: str) -> None:
    browser = httpx.get(f"http://{address}/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert browser.status_code == 200
    assert "<html" in browser.text
    assert httpx.get(f"http://{address}/deep/lmtp").status_code == 404
    with pytest.raises(InvalidStatus):
        open_socket(address, "/elsewhere")


@pytest.mark.parametrize("origin", ["http://evil.example", "null"])
def test_pages_of_others_may_not_use_a_users_browser(address: str, origin: str) -> None:
    with pytest.raises(InvalidStatus) as refusal:
        open_socket(address, origin=origin)
    assert refusal.value.response.status_code == 403


def test_own_pages_and_friends_may(address: str) -> None:
    for origin in (f"http://{address}", "https://friend.example"):
        with open_socket(address, origin=origin) as socket:
            assert len(ask(socket, GENERATE)) == 3


def test_a_message_beyond_the_limit_closes_the_connection(address: str) -> None:
    with open_socket(address) as socket:
        (answer,) = ask(socket, 'FOO {"stream_id": 1, "x": "' + "x" * ((16 << 20) - 60) + '"}')
        assert answer["error"] == "Unknown command: FOO"
        with pytest.raises(ConnectionClosed) as closed:
            ask(socket, "x" * ((16 << 20) + 1))
        assert closed.value.rcvd is None or closed.value.rcvd.code == 1009  # lost if the rest was on its way


def test_keys_are_asked_for_before_the_upgrade(tmp_path: Path) -> None:
    keys = KeyStore(tmp_path / "keys")
    key = keys.add("ann")
    basic = base64.b64encode(f"ann:{key}".encode()).decode()
    try:
        with served(scripted_model(), keys=keys, fronts=[websocket_front()]) as url:
            address = url.removeprefix("http://")
            for wrong in ({}, {"Authorization": "Bearer nope"}, {"Authorization": "Basic !"}):
                with pytest.raises(InvalidStatus) as refusal:
                    open_socket(address, additional_headers=wrong)
                assert refusal.value.response.status_code == 401
                assert "API key" in json.loads(refusal.value.response.body or b"{}")["error"]["message"]
            for path, headers in (
                ("/", {"Authorization": f"Basic {basic}"}),
                ("/", {"Authorization": f"Bearer {key}"}),
            ):
                with open_socket(address, path, additional_headers=headers) as socket:
                    assert len(ask(socket, GENERATE)) == 3
            assert httpx.get(f"{url}/v1/models?key={key}").status_code == 401  # addresses end up in logs
    finally:
        keys.close()


@pytest.mark.parametrize("needs_key", [True, False])
def test_a_key_in_an_address_is_refused_with_what_to_do(tmp_path: Path, needs_key: bool) -> None:
    keys = KeyStore(tmp_path / "keys")
    key = keys.add("ann")
    try:
        with served(scripted_model(), keys=keys if needs_key else None, fronts=[websocket_front()]) as url:
            for headers in ({}, {"Authorization": f"Bearer {key}"}):
                with pytest.raises(InvalidStatus) as refusal:
                    open_socket(url.removeprefix("http://"), f"/lmtp?key={key}", additional_headers=headers)
                assert refusal.value.response.status_code == 401
                told = json.loads(refusal.value.response.body or b"{}")["error"]["message"]
                assert "POST /v1/websocket_tickets" in told and "Authorization" in told and key not in told
    finally:
        keys.close()


def test_a_ticket_opens_one_socket_in_its_users_name(tmp_path: Path) -> None:
    keys = KeyStore(tmp_path / "keys")
    key = keys.add("ann")
    try:
        with served(scripted_model(), keys=keys, fronts=[websocket_front()]) as url:
            address, route = url.removeprefix("http://"), f"{url}/v1/websocket_tickets"
            assert httpx.post(route).status_code == 401
            answer = httpx.post(route, headers={"Authorization": f"Bearer {key}"})
            body = answer.json()
            assert body["expires_in"] == TICKET_SECONDS and answer.headers["cache-control"] == "no-store"
            assert httpx.get(f"{url}/v1/models?ticket={body['ticket']}").status_code == 401  # WebSockets alone take it
            with open_socket(address, f"/lmtp?ticket={body['ticket']}") as socket:
                assert len(ask(socket, GENERATE)) == 3
            for used in (body["ticket"], "", "x"):
                with pytest.raises(InvalidStatus) as refusal:
                    open_socket(address, f"/?ticket={used}")
                assert refusal.value.response.status_code == 401
            told = json.loads(refusal.value.response.body or b"{}")["error"]["message"]
            assert "was used" in told and "POST /v1/websocket_tickets" in told
            for number in range(MAX_PER_USER + 1):
                status = httpx.post(route, headers={"Authorization": f"Bearer {key}"}).status_code
                assert status == (200 if number < MAX_PER_USER else 429)
    finally:
        keys.close()


async def test_our_client_sends_its_key_in_a_header(tmp_path: Path) -> None:
    keys, seen = KeyStore(tmp_path / "keys"), list[tuple[bytes, list[bytes]]]()
    key = keys.add("ann")

    def noting(host: AppState) -> LmtpEndpoint:
        class Noting(LmtpEndpoint):
            async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                seen.append((scope["query_string"], [name for name, _ in scope["headers"]]))
                await super().__call__(scope, receive, send)

        return Noting(LmtpServer(host))

    try:
        with served(scripted_model(), keys=keys, fronts=[noting]) as url:
            address = url.replace("http://", f"http://any:{key}@")
            async with Client(f"{address}/lmtp", NAME) as client:
                await client.model_info()
    finally:
        keys.close()
    assert [query for query, _ in seen] == [b""] and b"authorization" in seen[0][1]


def start(*args: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bridle", "serve-model", "demo", "--control", "off", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


def test_serve_model_says_where_and_drains(tmp_path: Path) -> None:
    words = ("serve-model", "demo", "--control", "off", "--port", "0", "--verbose", "--cuda")
    with PipedCommand(words) as server:
        assert server.stdout.readline().startswith("[Loading demo with bridle.LLM('demo'")
        line = server.stdout.readline()
        assert line.startswith("[Serving LMTP endpoint on ws://127.0.0.1:")
        address = line.rpartition("ws://")[2].removesuffix("/]\n")
        assert server.stdout.readline().startswith("[demo ready on device ")
        with open_socket(address) as socket:
            message = GENERATE.replace(NAME, "demo")
            assert len(ask(socket, message)) == 3
            assert server.stdout.readline() == message + "\n"
            server.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed):
                socket.recv(SECONDS)
        server.wait()


@pytest.mark.slow
def test_lines_for_a_parent_process() -> None:
    with start("--transport", "stdio", stdin=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdin is not None
        try:
            long = "x" * ((16 << 20) + 1)
            server.stdin.write(f"{long}\n\n" + GENERATE.replace(NAME, "demo") + "\n")
            server.stdin.flush()
            kind, _, body = server.stdout.readline().partition(" ")
            assert (kind, json.loads(body)[0]["stream_id"]) == ("MSG", None)
            found: list[Any] = []
            while not found or found[-1]["finish_reason"] is None:
                kind, _, body = server.stdout.readline().partition(" ")
                assert kind == "TOKEN"
                found += json.loads(body)
            assert len(found) == 3
            server.stdin.close()
            assert server.wait(SECONDS) == 0
        finally:
            server.kill()


def test_all_front_ends_of_a_server_have_one_share_of_its_loop() -> None:
    app = create_app(ModelRegistry(), fronts=[websocket_front()])
    config: Any = uvicorn_config(app, ServeSettings())
    (front,) = [front for front in app.state.http.fronts if isinstance(front, LmtpEndpoint)]
    turns = app.state.http.turns
    assert config.http.shares is turns and config.ws.shares is turns and front.server.home.host.turns is turns


def test_a_flood_is_closed_with_a_reason_that_arrives(address: str) -> None:
    for message in ("NONE", b"binary"):
        with open_socket(address) as socket:
            with contextlib.suppress(ConnectionClosed):
                for _ in range(2 * MAX_USELESS):
                    socket.send(message)
                while True:
                    socket.recv(SECONDS)
            assert socket.close_code == 1008 and (socket.close_reason or "").startswith("too many ")
