"""Tests that front-end processes write the same streams as the server. A dead one loses only its own connections."""

from __future__ import annotations

import errno
import http.client
import json
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bridle.errors import InvalidRequest
from bridle.http import ServeSettings
from bridle.http.server.tls import TlsFiles
from bridle.http.writers.frames import FrameReader, Orders, frame
from bridle.http.writers.transport import WriterTransport
from tests.http.front_ends import FrontEnds, front_ended
from tests.http.harness import NAME, leisurely_model, scripted_model
from tests.http.plain_streams import BODIES, one_token_model, read_stream, script, text_of_completion
from tests.http.small_server import small_server
from tests.waiting import PATIENCE, until

_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LONG: dict[str, Any] = {"model": NAME, "prompt": "Hi", "max_tokens": 400, "stream": True, "ignore_eos": True}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", [*BODIES, "choices"])
def test_streams_are_the_same(name: str) -> None:
    """The server writes to clients itself while no front-end process runs."""
    path, body = BODIES.get(name) or ("/v1/completions", {"prompt": "Hi", "n": 2})
    with front_ended(scripted_model(next_token=script)) as server, httpx.Client() as client:
        theirs = read_stream(server.url, path, body, client.post)
        (writer,) = server.pool.writers
        assert writer.num_connections == 1
    with front_ended(scripted_model(next_token=script), 1) as server:
        ours = read_stream(server.url, path, body)
    assert theirs == ours


def test_a_connection_goes_on_after_a_stream() -> None:
    body: dict[str, Any] = {"model": NAME, "prompt": "Hi", "max_tokens": 60}
    with front_ended(scripted_model(next_token=script)) as server, httpx.Client(base_url=server.url) as client:
        first = read_stream("", *BODIES["completions"], client.post)
        whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert client.post("/v1/completions", json={"model": NAME}).status_code == 400
        second = read_stream("", *BODIES["completions"], client.post)
        assert server.pool.writers[0].num_connections == 1
        assert first == second
        assert first[1] == whole


def test_answers_keep_the_order_of_requests() -> None:
    """The second request arrives before the stream of the first request begins."""
    body = json.dumps(LONG | {"max_tokens": 5}).encode()
    stream = _HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    last = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with front_ended(scripted_model(next_token=script)) as server, _connected(server) as sock:
        sock.sendall(stream + stream + last)
        data = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    first, second, models = data.split(b"HTTP/1.1 200 OK")[1:]
    for part in (first, second):
        assert part.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert json.loads(models.split(b"\r\n\r\n")[1])["data"][0]["id"] == NAME


def test_a_refusal_closes_the_connection_after_a_stream() -> None:
    """The refused request's body is longer than the part that the server reads and drops."""
    with front_ended(leisurely_model(), max_requests=1) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE)
        _post(connection, LONG | {"max_tokens": 2}).read()
        until(lambda: not server.http.admission.num_requests, "that there is room for another request")
        with httpx.stream("POST", server.url + "/v1/completions", json=LONG, timeout=PATIENCE) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()  # kept, because the end of an iterator closes its stream
            next(lines)
            connection.putrequest("POST", "/v1/completions")
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(1 << 30))
            connection.endheaders()
            refused = connection.getresponse()
            assert (refused.status, refused.headers["connection"]) == (429, "close")
            assert refused.read()
            assert connection.sock is None or connection.sock.recv(1) == b""
        connection.close()
        server.until_quiet()


def test_a_slow_client_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client does not read until many bytes wait for it."""
    states: list[bool] = []
    fill = WriterTransport.fill
    monkeypatch.setattr(WriterTransport, "fill", lambda self, is_full: (states.append(is_full), fill(self, is_full)))
    model, text = one_token_model()
    with front_ended(model) as server, _connected(server, 4096) as sock:
        _send(sock, LONG | {"max_tokens": 4000})
        until(lambda: states, "that bytes wait")
        assert text_of_completion(_rest(sock)) == text
        server.until_quiet()
    assert states[:2] == [True, False]


def test_a_client_that_does_not_read_is_disconnected() -> None:
    model, _ = one_token_model()
    with front_ended(model, send_timeout=0.5) as server, _connected(server, 4096) as sock:
        _send(sock, LONG | {"max_tokens": 8000})
        server.until_quiet()


def test_a_client_that_leaves_ends_its_request() -> None:
    with front_ended(leisurely_model()) as server:
        with _connected(server) as sock:
            _send(sock, LONG)
            assert sock.recv(100)
        server.until_quiet()


def test_a_killed_front_end_ends_its_streams_alone() -> None:
    with front_ended(leisurely_model(), 3) as server, _connected(server) as one, _connected(server) as other:
        for sock in (one, other):
            _send(sock, LONG | {"max_tokens": 100})
            assert sock.recv(1)
        first, second = server.pool.writers
        assert (first.num_connections, second.num_connections) == (1, 1)
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        lost = _rest(one)
        assert b"[DONE]" not in lost
        assert b"[DONE]" in _rest(other)
        until(lambda: first.num_restarts == 1 and first.is_up, "that the process runs again")
        server.until_quiet()
        for _ in range(2):  # one over each process
            assert read_stream(server.url, *BODIES["usage"])


def test_the_server_writes_while_no_front_end_runs() -> None:
    with front_ended(scripted_model(next_token=script)) as server:
        (writer,) = server.pool.writers
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        until(lambda: not writer.is_up, "that the process has ended")
        assert read_stream(server.url, *BODIES["completions"])


def test_the_server_writes_without_a_descriptor_for_a_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with front_ended(scripted_model(next_token=script)) as server, httpx.Client(base_url=server.url) as client:
        first = read_stream("", *BODIES["completions"], client.post)
        monkeypatch.setattr(os, "dup", refuse)
        with httpx.Client(base_url=server.url) as another:
            assert read_stream("", *BODIES["completions"], another.post) == first
            assert server.pool.writers[0].num_connections == 1


def test_a_front_end_that_hangs_is_replaced() -> None:
    with front_ended(leisurely_model(), ping_seconds=1.0) as server, _connected(server) as sock:
        _send(sock, LONG)
        assert sock.recv(1)
        (writer,) = server.pool.writers
        assert writer.pid is not None
        process = psutil.Process(writer.pid)
        process.suspend()
        assert b"[DONE]" not in _rest(sock)
        until(lambda: writer.num_restarts and writer.is_up, "that another process runs")
        assert not process.is_running()
        server.until_quiet()


def test_many_streams_begin_at_once() -> None:
    """The streams need more file descriptors than one message may carry."""
    texts: list[str] = []

    def read() -> None:
        texts.append(read_stream(server.url, *BODIES["completions"])[1])

    with front_ended(scripted_model(next_token=script, num_blocks=2048)) as server:
        threads = [threading.Thread(target=read) for _ in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.until_quiet()
    assert len(texts) == 100
    assert len(set(texts)) == 1


def test_streams_end_before_the_server() -> None:
    """Front ends ignore the termination signal, because a service manager sends it to all processes."""
    with small_server(PATIENCE, front_ends=2) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        child = until(lambda: _writers(server.process.pid), "a front-end process")[0]
        until(lambda: client.get("v1/status").json()["front_ends"][0]["is_up"], "that it is up")
        body = {"prompt": "a", "max_tokens": 400, "seed": 1, "stream": True}
        with client.stream("POST", "v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines)
            child.send_signal(signal.SIGTERM)
            server.signal_and_wait(signal.SIGTERM)
            server.hurry()
            assert "data: [DONE]" in [*lines]
        assert server.process.wait() == 0
        psutil.wait_procs([child], PATIENCE)
        assert not child.is_running()


def test_a_front_end_ends_with_the_server() -> None:
    with small_server(PATIENCE, front_ends=2) as server:
        child = until(lambda: _writers(server.process.pid), "a front-end process")[0]
        server.process.send_signal(signal.SIGKILL)
        psutil.wait_procs([child], PATIENCE)
        assert not child.is_running()


def test_its_state_shows() -> None:
    with front_ended(scripted_model(next_token=script)) as server, httpx.Client(base_url=server.url) as client:
        read_stream("", *BODIES["completions"], client.post)
        metrics = client.get("/metrics").text
        (told,) = client.get("/v1/status").json()["front_ends"]
        assert told == {"pid": server.pool.writers[0].pid, "is_up": True, "connections": 1, "restarts": 0}
    assert 'bridle_front_end_up{process="1"} 1.0' in metrics
    assert 'bridle_front_end_connections{process="1"} 1.0' in metrics
    assert 'bridle_front_end_restarts_total{process="1"} 0.0' in metrics


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"front_ends": 0}, "front_ends is 0; must be at least 1"),
        ({"front_ends": 65}, "front_ends is 65; must be at most 64"),
        ({"front_ends": 2, "tls": TlsFiles(Path("a"), Path("b"))}, "front_ends is 2, which is not supported with TLS"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ServeSettings(**settings)


def test_frames_come_in_any_pieces() -> None:
    messages = [Orders([1, 2], [1], [b"text"]), Orders(), Orders(dropped=[2], ping=True)]
    data = b"".join(map(frame, messages))
    reader = FrameReader(Orders)
    assert [each for place in range(len(data)) for each in reader.feed(data[place : place + 1])] == messages
    assert [*reader.feed(data)] == messages


def _connected(server: FrontEnds, num_bytes: int | None = None) -> socket.socket:
    """Return a connection with `num_bytes` of unsent data for its client."""
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.socket()
    if num_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, num_bytes)
    sock.settimeout(PATIENCE)
    sock.connect((host, int(port)))
    return sock


def _send(sock: socket.socket, fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    sock.sendall(_HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def _rest(sock: socket.socket) -> bytes:
    """Return all data that arrives until the connection is closed or reset."""
    data = b""
    try:
        while more := sock.recv(1 << 16):
            data += more
    except ConnectionError:
        pass
    return data


def _post(connection: http.client.HTTPConnection, fields: dict[str, Any]) -> http.client.HTTPResponse:
    connection.request("POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"})
    return connection.getresponse()


def _writers(pid: int) -> list[psutil.Process]:
    return [each for each in psutil.Process(pid).children() if "bridle.http.writers.process" in each.cmdline()]
