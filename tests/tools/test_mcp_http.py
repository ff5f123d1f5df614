"""Servers of the Model Context Protocol over HTTP: a real one of the official package on the loopback, with faults."""

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

from bridle.tools import Call, ToolDesk, ToolLimits
from bridle.tools.mcp import McpServer, McpTool
from tests.waiting import PATIENCE, until

pytest.importorskip("mcp.server.mcpserver", reason="the package mcp is not installed")

LIMIT = 100_000
JSON, EVENTS = "application/json", "text/event-stream"


class Faulty:
    """The server's application, but for calls of certain tools: these are answered as no server should."""

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

    for name in ("broken", "fails", "huge", "event"):
        server.add_tool(lambda: "", name=name)
    return Faulty(server.streamable_http_app(), seen)


@contextmanager
def serving(seen: list[dict[str, Any]], port: int = 0) -> Iterator[int]:
    """A server in a thread, on that port or any."""
    listener = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(make_app(seen), log_config=None, timeout_graceful_shutdown=0)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        listener.close()


def desk_of(port: int) -> ToolDesk:
    server = McpServer(url=f"http://127.0.0.1:{port}/mcp", headers={"X-Key": "secret"}, max_bytes=LIMIT)
    limits = ToolLimits(timeout=PATIENCE, max_timeout=PATIENCE, max_result_bytes=LIMIT)
    return ToolDesk({"it": McpTool("it", server, pause=0.0)}, limits)


def ask(desk: ToolDesk, name: str, timeout: float | None = None, **arguments: object) -> Call:
    call = desk.begin(name, arguments, timeout)
    until(lambda: call.is_done)
    return call


def test_a_server_over_http_answers_and_its_faults_are_told() -> None:
    seen: list[dict[str, Any]] = []
    with serving(seen) as port:
        desk = desk_of(port)
        try:
            assert ask(desk, "it.echo", word="grün").text == "grün"
            assert {each["key"] for each in seen} == {"secret"}
            assert (
                ask(desk, "it.absent").error
                == "it has no tool 'absent'; there are echo, hangs, broken, fails, huge, event"
            )
            assert ask(desk, "it.hangs", 0.05).error == "did not answer within 0.05 seconds"
            for name in ("broken", "fails", "huge", "event"):
                failed = ask(desk, f"it.{name}", 5.0)
                assert failed.error is not None, name
                assert ask(desk, "it.echo", word=name).text == name  # nobody else is hurt
        finally:
            desk.close()


def test_a_server_over_http_that_restarts_is_connected_to_again() -> None:
    """A session that the new one does not know is begun anew, and the call made then: the old one did not run it."""
    seen: list[dict[str, Any]] = []
    with serving(seen) as port:
        desk = desk_of(port)
        assert ask(desk, "it.echo", word="before").text == "before"
    try:
        away = ask(desk, "it.echo", word="away")
        assert away.error is not None
        with serving(seen, port):
            assert ask(desk, "it.echo", word="after").text == "after"
        with serving(seen, port):  # nothing was asked meanwhile
            assert ask(desk, "it.echo", word="again").text == "again"
    finally:
        desk.close()
    assert [each["method"] for each in seen].count("initialize") <= 4
