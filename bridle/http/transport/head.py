"""Answers HEAD on every route with GET: the same answer without its body, which link checkers, proxies and some clients
ask for."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadMiddleware:
    """Asks the application for GET, and drops the body of its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        # The scope is copied, except for its state, which other code reads later.
        await self._app({**scope, "method": "GET"}, receive, send_head)
