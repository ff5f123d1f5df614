"""Mounts front-ends for WebSockets, such as LMTP's, on the port of the HTTP routes.

A front-end is an ASGI application. The HTTP application passes WebSockets at the front-end's paths to the front-end,
and closes the front-end at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send

if TYPE_CHECKING:
    from fastapi import FastAPI

    from bridle.http.state import HttpState


class WebSocketFrontend(Protocol):
    """An ASGI application for the WebSockets at `paths`. This application gets every WebSocket at these paths; the HTTP
    routes handle all other requests."""

    @property
    def paths(self) -> Sequence[str]:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def drain(self, seconds: float) -> None:
        """Refuse new work. Open connections have `seconds` to finish."""

    async def close(self) -> None:
        """Close all open connections, and report the shutdown to their clients."""


SocketFrontMaker = Callable[["HttpState"], WebSocketFrontend]


def mount(app: FastAPI, state: HttpState, make: SocketFrontMaker) -> None:
    """Pass WebSockets at the paths of a front-end to the front-end, which `make` creates."""
    front = make(state)
    state.fronts.append(front)
    for path in dict.fromkeys(front.paths):
        app.router.routes.append(WebSocketRoute(path, front))
