"""Front-ends that speak over WebSockets on the port of the HTTP routes.

The HTTP application knows no more of them than this: where they are found, that they are ASGI applications, and that
they end when it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send

if TYPE_CHECKING:
    from fastapi import FastAPI

    from bridle.http.state import HttpState


class SocketFront(Protocol):
    """An ASGI application for the WebSockets at `paths`. An upgrade there is its own; anything else keeps its HTTP
    meaning."""

    @property
    def paths(self) -> Sequence[str]:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def drain(self, seconds: float) -> None:
        """Begin nothing new; what is open has `seconds`."""

    async def close(self) -> None:
        """End what is open, and tell the clients."""


SocketFrontMaker = Callable[["HttpState"], SocketFront]


def mount(app: FastAPI, state: HttpState, make: SocketFrontMaker) -> None:
    """Let a front-end answer at its paths."""
    front = make(state)
    state.fronts.append(front)
    for path in dict.fromkeys(front.paths):
        app.router.routes.append(WebSocketRoute(path, front))
