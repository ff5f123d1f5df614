"""MCP servers over HTTP: a real server of the official package on the loopback interface, with added faults."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from bridle.controller_tools import Call, ToolExecutor, ToolLimits
from bridle.controller_tools.mcp import McpServer, McpTool
from tests.conftest import IS_FULL
from tests.waiting import PATIENCE, until

pytest.importorskip("mcp.server.mcpserver", reason="the package mcp is not installed")

LIMIT = 100_000
#: Tools whose calls are answered wrongly, and how that is told.
FAULTS = {
    "broken": "it: Failed to parse JSON response",
    "fails": "it: Server returned an error response",
    "huge": f"server it ended during the call: the answer has more than {LIMIT + 65_536} bytes (max_result_bytes)",
    "event": f"exceeded the {LIMIT + 65_536} byte limit",
}
JSON, EVENTS = "application/json", "text/event-stream"


class Faulty:
    """The server's application, except that calls of certain tools get answers that no server should give."""

    def __init__(self, app: ASGIApp, seen: list[dict[str, Any]]) -> None:
        self.app, self.seen = app, seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        asked = json.loads(body)
        self.seen.append({"method": asked["method"], "key": dict(scope["headers"]).get(b"x-key", b"").decode()})
        fault = asked["params"]["name"] if asked["method"] == "tools/call" else ""
        match fault:
            case "broken":
                await answer(send, 200, JSON, b'{"jsonrpc": "2.0", "id":')
            case "fails":
                await answer(send, 500, "text/plain", b"out of order")
            case "huge":
                await answer(send, 200, JSON, b"x" * (1 << 20), 100)
            case "event":
                await answer(send, 200, EVENTS, b"data: " + b"x" * (1 << 20), 100)
            case _:
                await self.app(scope, replaying(body, receive), send)


def replaying(body: bytes, receive: Receive) -> Receive:
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return pending.pop() if pending else await receive()

    return again


async def answer(send: Send, status: int, kind: str, body: bytes, times: int = 1) -> None:
    headers = [(b"content-type", kind.encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for _ in range(times):
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def make_app(seen: list[dict[str, Any]]) -> ASGIApp:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("faulty", log_level="CRITICAL")

    @server.tool()
    def echo(word: str) -> str:
        return word

    @server.tool()
    async def hangs() -> str:
        await asyncio.Event().wait()
        return ""

    for name in FAULTS:
        server.add_tool(lambda: "", name=name)
    return Faulty(server.streamable_http_app(), seen)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@contextmanager
def serving(listener: socket.socket, seen: list[dict[str, Any]]) -> Iterator[int]:
    """Run a server in a thread, on the port of a listener that stays open longer than the server."""
    config = uvicorn.Config(make_app(seen), log_config=None, timeout_graceful_shutdown=0)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener.dup()],), daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(PATIENCE)


def desk_of(port: int) -> ToolExecutor:
    server = McpServer(url=f"http://127.0.0.1:{port}/mcp", headers={"X-Key": "secret"}, max_bytes=LIMIT)
    limits = ToolLimits(timeout=PATIENCE, max_timeout=PATIENCE, max_result_bytes=LIMIT)
    return ToolExecutor({"it": McpTool("it", server, pause=0.0)}, limits)


def ask(desk: ToolExecutor, name: str, timeout: float | None = None, **arguments: object) -> Call:
    call = desk.begin(name, arguments, timeout)
    until(lambda: call.is_done)
    return call


def test_a_server_over_http_answers_and_its_faults_are_told(listener: socket.socket) -> None:
    seen: list[dict[str, Any]] = []
    with serving(listener, seen) as port:
        desk = desk_of(port)
        try:
            assert ask(desk, "it.echo", word="grün").text == "grün"
            assert {each["key"] for each in seen} == {"secret"}
            assert (
                ask(desk, "it.absent").error
                == "server it has no tool 'absent'; its tools are echo, hangs, broken, fails, huge, event"
            )
            assert ask(desk, "it.hangs", 0.05).error == "the tool did not answer within 0.05 seconds"
            for name, why in FAULTS.items():
                failed = ask(desk, f"it.{name}")
                assert failed.error is not None and why in failed.error, name
                assert ask(desk, "it.echo", word=name).text == name  # nobody else is hurt
        finally:
            desk.close()


def test_a_server_over_http_that_restarts_is_connected_to_again(listener: socket.socket) -> None:
    """If the restarted server does not know the session, the client begins a new session and then calls: the old server
    did not run the call."""
    words = ("before", "after", "again")[: 3 if IS_FULL else 2]
    seen: list[dict[str, Any]] = []
    desk = desk_of(listener.getsockname()[1])
    try:
        for word in words:
            with serving(listener, seen):
                assert ask(desk, "it.echo", word=word).text == word
                assert ask(desk, "it.echo", word=word).text == word
    finally:
        desk.close()
    assert [each["method"] for each in seen].count("initialize") == len(words)


def test_nobody_is_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and not listening
        desk = desk_of(taken.getsockname()[1])
        error = ask(desk, "it.echo").error
        desk.close()
    assert error == "it did not start: All connection attempts failed"
