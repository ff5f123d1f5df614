"""Tests that the recorder in front of a server ends when its client ends, so that the server does not wait for that
client."""

from __future__ import annotations

import http.client
import socket
import threading

from dev.agents.recorder import recording
from tests.waiting import PATIENCE, until


def test_a_client_that_leaves_before_the_answer_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, recording(listener.getsockname()[1]) as (port, seen):
        client = http.client.HTTPConnection("127.0.0.1", port)
        client.request("POST", "/v1/messages", b"{}")
        server, _ = listener.accept()
        with server:
            server.settimeout(PATIENCE)
            while not server.recv(1 << 16).endswith(b"{}"):
                pass
            client.close()
            assert server.recv(1) == b""
        until(lambda: len(seen) == 1)
        assert not seen[0].is_whole


def test_a_client_that_stays_gets_the_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, recording(listener.getsockname()[1]) as (port, seen):

        def answer() -> None:
            server, _ = listener.accept()
            with server:
                server.recv(1 << 16)
                server.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")

        thread = threading.Thread(target=answer)
        thread.start()
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        client.request("GET", "/health")
        assert client.getresponse().read() == b"hi"
        client.close()
        thread.join(PATIENCE)
        until(lambda: seen[0].is_whole)
