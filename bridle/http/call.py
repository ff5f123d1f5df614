"""One HTTP call from its first byte to its last: its id, its story for the log, and what must be given back.

A pure ASGI middleware, so that it sees streams to their end and a client that leaves. Whatever a route
reserves (a place, an event stream) it hands to `Call.resources`; that is closed on every path.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bridle.errors import BridleError
from bridle.http.errors import internal_error_body, json_response
from bridle.outputs import Usage
from bridle.service import new_request_id
from bridle.service.keys import Identity

_log: structlog.stdlib.BoundLogger = structlog.get_logger("bridle.http")
#: Routes that generate text.
GENERATING_ROUTES = frozenset(
    {
        "/",
        "/generate",
        "/generate_stream",
        "/invocations",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
        "/v1/run",
    }
)
_QUIET = ("/health", "/metrics")


@dataclass(slots=True)
class Call:
    """What is known of a call. Times are of the monotonic clock, in seconds; `queued` is how
    long the engine had no room for it."""

    id: str
    method: str
    path: str
    began: float
    identity: Identity | None = None
    model: str | None = None
    adapter: str | None = None
    usage: Usage | None = None
    submitted: float | None = None
    queued: float = 0.0
    max_new_tokens: int | None = None
    first_token: float | None = None
    last_token: float | None = None
    finish: list[str] = field(default_factory=list)
    error: BridleError | None = None
    status: int | None = None
    resources: ExitStack = field(default_factory=ExitStack)

    def note_tokens(self) -> None:
        """Tokens are on their way to the client now."""
        self.last_token = time.monotonic()
        if self.first_token is None:
            self.first_token = self.last_token


def call_of(scope: Scope) -> Call:
    """The call that a request belongs to."""
    call = scope["state"]["call"]
    assert isinstance(call, Call)
    return call


class CallMiddleware:
    """Gives every HTTP request a `Call`, answers bugs with a 500, and tells the story at the end."""

    def __init__(self, app: ASGIApp, on_end: Callable[[Call, float], None]) -> None:
        self._app = app
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = Call(new_request_id(), scope["method"], scope["path"][:200], time.monotonic())
        scope.setdefault("state", {})["call"] = call
        try:
            await self._run(call, scope, receive, _naming(call, send))
        finally:
            call.resources.close()
            seconds = time.monotonic() - call.began
            self._on_end(call, seconds)
            _tell(call, seconds)

    async def _run(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception:
            _log.exception("bug", id=call.id, path=call.path)
            if call.status is None:
                await json_response(internal_error_body(call.id), 500)(scope, receive, send)


def _naming(call: Call, send: Send) -> Send:
    """`send`, noting the status and adding the call's id to the response headers."""

    async def send_named(message: Message) -> None:
        if message["type"] == "http.response.start":
            call.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", call.id.encode())]
        await send(message)

    return send_named


def _tell(call: Call, seconds: float) -> None:
    """One line that tells what happened."""
    story: dict[str, Any] = {"id": call.id, "route": f"{call.method} {call.path}", "status": call.status}
    if call.identity is not None:
        story["user"] = call.identity.user
    if call.model is not None:
        story["model"] = call.model
    if call.adapter is not None:
        story["adapter"] = call.adapter
    if call.usage is not None:
        story |= {"prompt": call.usage.prompt_tokens, "cached": call.usage.cached_tokens}
        story["completion"] = call.usage.completion_tokens
    if call.first_token is not None:
        story["first_token_ms"] = round(1000 * (call.first_token - call.began), 1)
    story["ms"] = round(1000 * seconds, 1)
    if call.finish:
        story["finish"] = ",".join(sorted(set(call.finish)))
    if call.error is not None:
        story["error"] = f"{call.error.code}: {call.error}"[:300]
    log = _log.debug if call.path.startswith(_QUIET) else _log.info
    log("request", **story)
