"""LMTP over WebSockets, as an ASGI application next to the HTTP routes on the same port.

Text frames are messages; binary frames are ignored, as in the original server. The ASGI scope has the client's
identity, which was checked before. Pages of other origins are refused, because their connections would have the rights
of the browser's user.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from bridle.errors import ConnectionLost
from bridle.lmtp.server.server import LmtpServer
from bridle.lmtp.server.settings import LmtpSettings
from bridle.serving.lifecycle.request_lifecycle import AppState
from bridle.serving.lifecycle.request_record import trace_headers
from bridle.serving.tenancy.allowed_origins import may_connect
from bridle.serving.tenancy.keys import LOCAL_USER, Identity
from bridle.serving.tenancy.loop_throttle import RateBudget

_GOING_AWAY, _POLICY_VIOLATION = 1001, 1008  # close codes of WebSockets

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class LmtpEndpoint:
    """The ASGI application of an LMTP server, for the WebSockets at `paths`."""

    def __init__(self, server: LmtpServer) -> None:
        self.server = server

    @property
    def paths(self) -> tuple[str, ...]:
        return "/", self.server.settings.path

    def drain(self, seconds: float) -> None:
        """Refuse new streams. Open streams have `seconds` to finish."""
        self.server.drain(seconds)

    async def close(self) -> None:
        """End all streams and connections, and report the shutdown to the clients."""
        await self.server.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            raise TypeError(f"an LMTP endpoint accepts only WebSocket connections, not {scope['type']}")
        if not may_connect(scope["headers"], self.server.settings.allowed_origins):
            await send({"type": "websocket.close", "code": 1008, "reason": "pages of this origin may not connect"})
            return
        await receive()  # receives `websocket.connect`
        await send({"type": "websocket.accept"})
        identity = scope.get("state", {}).get("identity")
        link = WebSocketLink(receive, send)
        known = identity if isinstance(identity, Identity) else LOCAL_USER
        await self.server.serve(link, known, trace_headers(scope["headers"]))


def websocket_front(
    settings: LmtpSettings | None = None, echo: Callable[[str], None] | None = None
) -> Callable[[AppState], LmtpEndpoint]:
    """Return a function with which an HTTP application creates its LMTP endpoint."""
    return lambda host: LmtpEndpoint(LmtpServer(host, settings, echo))


class WebSocketLink:
    """A `ServerChannel` over an accepted WebSocket."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._is_closed = False
        self._ignored = RateBudget()

    async def send(self, message: str) -> None:
        if self._is_closed:
            raise ConnectionLost("the connection is closed")
        try:
            await self._send({"type": "websocket.send", "text": message})
        except (OSError, RuntimeError) as error:  # the error of ASGI servers for a closed connection
            raise ConnectionLost(f"the client has disconnected: {error or type(error).__name__}") from error

    async def receive(self) -> str:
        while True:
            event = await self._receive()
            if event["type"] == "websocket.disconnect":
                self._is_closed = True
                raise ConnectionLost("the client has closed the connection")
            text = event.get("text")
            if text is not None:
                return str(text)
            self._ignored.charge("binary messages")

    async def close(self, reason: str = "") -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(OSError, RuntimeError):
            code = _POLICY_VIOLATION if reason else _GOING_AWAY
            await self._send({"type": "websocket.close", "code": code, "reason": reason})
