"""Tests of early answers: refusals while the server is full, and health probes. These answers do not need the request's
body. A refused connection gets its next answer in its user's turn."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from bridle.errors import BridleError, Overloaded
from bridle.http.errors import error_response, refuse_plainly
from bridle.http.middleware.request_context import MODEL_ROUTES
from bridle.http.server.early_reject import DoorAnswer
from bridle.http.server.uvicorn_protocol import bounded_protocol
from bridle.http.settings import HttpSettings
from bridle.serving import Admission
from bridle.serving.tenancy.keys import KeyStore
from bridle.serving.tenancy.loop_throttle import LoopThrottle
from bridle.serving.tenancy.rate_limit import UserLimits
from tests.http.carrier import Carrier
from tests.http.harness import raw_request, served
from tests.serving.fakes import fake_model, say
from tests.waiting import PATIENCE, until

WAIT = PATIENCE
HEAD = "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@pytest.fixture
def full() -> Iterator[str]:
    """Yield the address of a server with one request slot, which is in use."""
    with served(fake_model(say("hello"), is_endless=True), HttpSettings(max_requests=1)) as url:
        held = raw_request(url, "/v1/completions", {"prompt": "a", "stream": True})
        assert held.recv(10)
        yield url
        held.close()


def open_raw(url: str) -> socket.socket:
    return socket.create_connection((urlsplit(url).hostname, urlsplit(url).port or 80), timeout=WAIT)


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Return the status, headers and body of one answer. Reads no byte after the answer."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        piece = connection.recv(1)
        assert piece, head
        head += piece
    status, *lines = head.decode().split("\r\n")[:-2]
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    body = b""
    while len(body) < int(headers["content-length"]):
        body += connection.recv(int(headers["content-length"]) - len(body))
    return int(status.split()[1]), headers, body


@pytest.mark.few(9)
@pytest.mark.parametrize("path", sorted(MODEL_ROUTES))
def test_a_full_server_refuses_before_a_byte_of_the_body_came(full: str, path: str) -> None:
    with open_raw(full) as connection:
        connection.sendall((HEAD.format(path=path) + "Content-Length: 1000\r\n\r\n").encode())
        status, headers, body = read_answer(connection)
        assert status == 429 and int(headers["retry-after"]) >= 1 and headers["x-request-id"]
        assert b"1 requests are in flight, and this call wants 1 more; at most 1" in body
        assert ("request-id" in headers) is (path == "/v1/messages")
        connection.sendall(b" " * 1000)  # nobody parses it, and the connection is as good as before
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert read_answer(connection)[0] == 200


@pytest.mark.parametrize("more", ["Content-Length: 9000000", "Transfer-Encoding: chunked", "Connection: close"])
def test_a_long_body_costs_the_connection_and_not_the_answer(full: str, more: str) -> None:
    with open_raw(full) as connection:
        connection.sendall((HEAD.format(path="/generate") + more + "\r\n\r\n").encode() + b"a" * 100_000)
        status, headers, _ = read_answer(connection)
        assert status == 429 and headers["connection"] == "close"
        assert connection.recv(1) == b""


def test_a_client_that_asks_first_is_not_told_to_go_on(full: str) -> None:
    with open_raw(full) as connection:
        head = HEAD.format(path="/v1/completions") + "Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(head.encode())
        status, headers, _ = read_answer(connection)
        assert status == 429 and headers["connection"] == "close"


def test_a_wrong_key_is_told_before_the_body(tmp_path: Path) -> None:
    keys = KeyStore(tmp_path / "keys.db")
    with served(fake_model(say("hello")), keys=keys) as url, open_raw(url) as connection:
        connection.sendall((HEAD.format(path="/v1/completions") + "Content-Length: 10\r\n\r\n").encode())
        status, _, body = read_answer(connection)
        assert status == 401 and b"an API key is needed" in body
    keys.close()


def test_a_refused_connection_is_heard_again_in_its_turn(full: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Callable[[], object]]] = []

    def ask(turns: LoopThrottle, user: str, go_on: Callable[[], object]) -> None:
        loop = asyncio.get_running_loop()
        asked.append((user, lambda: loop.call_soon_threadsafe(go_on)))

    monkeypatch.setattr(LoopThrottle, "schedule", ask)
    with open_raw(full) as connection:
        request = (HEAD.format(path="/v1/completions") + "Content-Length: 2\r\n\r\n{}").encode()
        connection.sendall(request)
        assert read_answer(connection)[0] == 429
        until(lambda: asked)  # after the answer was written
        assert [user for user, _ in asked] == ["localhost"]
        connection.sendall(request)
        for _ in range(3):  # the server is at its sockets again and again
            with open_raw(full) as other:
                other.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                assert read_answer(other)[0] == 200
        assert len(asked) == 1
        asked[0][1]()
        assert read_answer(connection)[0] == 429
        until(lambda: len(asked) > 1)
        assert [user for user, _ in asked] == ["localhost"] * 2


def test_a_probe_needs_no_place_and_no_application(full: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise AssertionError("the application was asked")

    monkeypatch.setattr("bridle.http.middleware.request_context.CallMiddleware.__call__", broken)
    with open_raw(full) as connection:
        for path in ("/health", "/ping", "/health/live", "/health/ready?verbose"):
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            assert read_answer(connection)[0] == 200


def test_who_does_not_take_refusals_is_not_asked_for_more() -> None:
    class Closed:
        def answer(self, scope: Any) -> DoorAnswer:
            return DoorAnswer(error_response(Overloaded("full")), "ann")

    async def main() -> None:
        door: Any = Closed()
        kind: Any = bounded_protocol(16_384, 10, HttpSettings(), refuse_plainly, door, LoopThrottle())
        config = uvicorn.Config(lambda: None, lifespan="off", log_config=None)
        protocol = kind(config=config, server_state=ServerState(), app_state={})
        carrier = Carrier()
        protocol.connection_made(carrier)
        request = (HEAD.format(path="/v1/completions") + "Content-Length: 2\r\n\r\n{}").encode()
        protocol.data_received(request)
        assert carrier.is_read and carrier.written.count(b"429 Too Many") == 1
        protocol.pause_writing()
        assert not carrier.is_read
        protocol.data_received(request)  # was on its way, and its turn comes at once
        assert not carrier.is_read and carrier.written.count(b"429 Too Many") == 2
        protocol.resume_writing()
        assert carrier.is_read
        protocol.connection_lost(None)

    asyncio.run(main())


def test_a_refused_connection_that_closes_waits_for_no_turn() -> None:
    class Closed:
        def answer(self, scope: Any) -> DoorAnswer:
            return DoorAnswer(error_response(Overloaded("full")), "ann")

    async def main() -> None:
        door: Any = Closed()
        turns = LoopThrottle()
        turns.charge(1.0)
        kind: Any = bounded_protocol(16_384, 10, HttpSettings(), refuse_plainly, door, turns)
        config = uvicorn.Config(lambda: None, lifespan="off", log_config=None)
        protocol = kind(config=config, server_state=ServerState(), app_state={})
        protocol.connection_made(Carrier())
        protocol.data_received((HEAD.format(path="/v1/completions") + "Content-Length: 2\r\n\r\n{}").encode())
        assert turns.num_waiting == 1
        protocol.connection_lost(None)
        assert turns.num_waiting == 0

    asyncio.run(main())


def test_requests_that_wait_on_a_connection_are_bounded() -> None:
    with served(fake_model(say("hello"), is_endless=True)) as url, open_raw(url) as connection:
        body = b'{"prompt": "a"}'
        first = (HEAD.format(path="/v1/completions") + f"Content-Length: {len(body)}\r\n\r\n").encode() + body
        connection.sendall(first + b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 200)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""


@given(
    st.lists(st.sampled_from("abc"), max_size=12),
    st.sampled_from("abc"),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
)
def test_a_look_says_what_admitting_one_would(held: list[str], user: str, rate: int | None, is_shared: bool) -> None:
    limits = UserLimits(requests_per_minute=rate)
    admission = Admission(8, clock=lambda: 0.0, is_shared=is_shared)
    for one in held:
        try:
            admission.admit(1, one, limits)
        except BridleError:
            continue
    before = admission.num_requests, admission.num_tokens

    def told(ask: Callable[[], object]) -> str | None:
        try:
            ask()
        except BridleError as error:
            return f"{type(error)} {error}"
        return None

    looked = [told(lambda: admission.check(user, limits)) for _ in range(3)]
    assert (admission.num_requests, admission.num_tokens) == before
    assert looked == [told(lambda: admission.admit(1, user, limits))] * 3
