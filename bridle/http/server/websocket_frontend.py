"""Front-ends over WebSockets on the port of the HTTP routes.

The HTTP application knows their paths. They are ASGI applications, and end when it does.
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
    """An ASGI application for the WebSockets at `paths`. It gets every upgrade there; other requests to these paths
    keep their HTTP meaning."""

    @property
    def paths(self) -> Sequence[str]:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def drain(self, seconds: float) -> None:
        """Refuse new work; open connections have `seconds` to finish."""

    async def close(self) -> None:
        """End all open connections, and tell the clients."""


SocketFrontMaker = Callable[["HttpState"], WebSocketFrontend]


def mount(app: FastAPI, state: HttpState, make: SocketFrontMaker) -> None:
    """Make a front-end answer at its paths."""
    front = make(state)
    state.fronts.append(front)
    for path in dict.fromkeys(front.paths):
        app.router.routes.append(WebSocketRoute(path, front))
