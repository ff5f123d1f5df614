"""LMTP over WebSockets, as an ASGI application to be mounted next to the HTTP routes of the same port.

Text frames are messages; binary ones are ignored, as the original does. The scope holds the client's identity, which
was checked before. A web page of another origin is refused, since a browser would connect it with its user's rights.
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

_GOING_AWAY, _POLICY_VIOLATION = 1001, 1008  # what a close frame says

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class LmtpEndpoint:
    """The ASGI application of a server, for the WebSockets at `paths`."""

    def __init__(self, server: LmtpServer) -> None:
        self.server = server

    @property
    def paths(self) -> tuple[str, ...]:
        return "/", self.server.settings.path

    def drain(self, seconds: float) -> None:
        """Refuse new streams; open streams have `seconds` to finish."""
        self.server.drain(seconds)

    async def close(self) -> None:
        """End everything that is open, and tell the clients."""
        await self.server.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            raise TypeError(f"an LMTP endpoint serves WebSockets, not {scope['type']}")
        if not may_connect(scope["headers"], self.server.settings.allowed_origins):
            await send({"type": "websocket.close", "code": 1008, "reason": "pages of this origin may not connect"})
            return
        await receive()  # websocket.connect
        await send({"type": "websocket.accept"})
        identity = scope.get("state", {}).get("identity")
        link = WebSocketLink(receive, send)
        known = identity if isinstance(identity, Identity) else LOCAL_USER
        await self.server.serve(link, known, trace_headers(scope["headers"]))


def websocket_front(
    settings: LmtpSettings | None = None, echo: Callable[[str], None] | None = None
) -> Callable[[AppState], LmtpEndpoint]:
    """A function with which an HTTP application makes its LMTP endpoint."""
    return lambda host: LmtpEndpoint(LmtpServer(host, settings, echo))


class WebSocketLink:
    """An accepted WebSocket as a link."""

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
        except (OSError, RuntimeError) as error:  # how ASGI servers report that the peer is gone
            raise ConnectionLost(f"the client is gone: {error or type(error).__name__}") from error

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
