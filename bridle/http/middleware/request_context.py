"""Follows an HTTP request from its first byte to its last: id, sender, record for log and trace, and resources to
release at the end.

The middleware is pure ASGI, so that it sees streams to their end and notices a client that disconnects. A route adds
everything that it reserves, such as an event stream, to `RequestContext.resources`, which is closed however the request
ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bridle.errors import EngineClosed, RequestCancelled, Unauthorized
from bridle.http.errors import Refuse, internal_error, refuse_plainly
from bridle.http.middleware.trusted_hosts import UnknownHost
from bridle.serving import new_request_id
from bridle.serving.lifecycle.request_record import RequestRecord, Tracing, trace_headers
from bridle.serving.tenancy.keys import Identity

T = TypeVar("T")
_log: structlog.stdlib.BoundLogger = structlog.get_logger("bridle.http")
#: Routes that generate text.
GENERATING_ROUTES = frozenset(
    {
        "/",
        "/api/chat",
        "/api/generate",
        "/generate",
        "/generate_stream",
        "/invocations",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
        "/v1/responses/compact",
        "/v1/run",
    }
)
#: Routes that use a pooling model; their calls are traced, too.
_POOLING_ROUTES = (
    "/api/embed",
    "/api/embeddings",
    "/v1/embeddings",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/classify",
    "/classify",
    "/embed",
    "/predict",
    "/similarity",
)
MODEL_ROUTES = GENERATING_ROUTES | {*_POOLING_ROUTES, "/v1/decide", "/v1/caches"}
_OPERATIONS = {
    **dict.fromkeys(_POOLING_ROUTES, "embeddings"),
    "/api/chat": "chat",
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/responses/compact": "chat",
}
_ANTHROPIC = "/v1/messages"
#: The response header with the names and versions of the policies in force, if the operator enables it.
POLICIES_HEADER = b"x-bridle-policies"
#: The response header that says if a requested trace was stored.
TRACE_HEADER = b"x-bridle-trace"
#: The key of an ASGI scope in which this process names the sender of its own calls. No client can set it.
IDENTITY = "bridle.identity"
_QUIET = ("/health", "/ping", "/metrics", "/v1/status")


@dataclass(slots=True, kw_only=True)
class RequestContext(RequestRecord):
    """The record of one HTTP request, and the resources to release at its end."""

    method: str
    path: str
    status: int | None = None
    resources: ExitStack = field(default_factory=ExitStack)

    @property
    def operation(self) -> str:
        """Return OpenTelemetry's name for the kind of request."""
        return _OPERATIONS.get(self.path, "text_completion")


def call_of(scope: Scope) -> RequestContext:
    """Return the `RequestContext` in an ASGI scope."""
    call = scope["state"]["call"]
    assert isinstance(call, RequestContext)
    return call


#: Finds the sender of a request from its headers, or None on routes that need no sender. Raises `Unauthorized`.
Identify = Callable[[HTTPConnection], Identity | None]


class CallMiddleware:
    """Gives every HTTP request a `RequestContext`, and every request and WebSocket its sender's `Identity`. Answers 401
    to unknown senders, and 500 after an unexpected exception. Passes the record of each request to `on_end`."""

    def __init__(
        self,
        app: ASGIApp,
        on_end: Callable[[RequestContext, float], None],
        identify: Identify,
        tracing: Tracing | None = None,
        refuse: Refuse = refuse_plainly,
    ) -> None:
        """Create the middleware. `refuse` builds the response to a refused request."""
        self._app = app
        self._on_end = on_end
        self._identify = identify
        self._tracing = tracing
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._let_in(scope, receive, send)
            return
        method, path = scope["method"], scope["path"][:200]
        call = RequestContext(id=new_request_id(), route=f"{method} {path}", method=method, path=path)
        if self._tracing is not None and call.method == "POST" and call.path in MODEL_ROUTES:
            call.span = self._tracing.begin(trace_headers(scope["headers"]))
        state = scope.setdefault("state", {})
        state["call"] = call
        named = _naming(call, send)
        if method == "HEAD":  # HEAD is like GET without a body; link checkers, proxies and some clients send it
            scope = {**scope, "method": "GET"}
        try:
            call.identity = state["identity"] = scope.get(IDENTITY) or self._identify(HTTPConnection(scope))
            await self._app(scope, receive, named)
        except Unauthorized as error:  # errors after identification are answered by the application
            await self._refuse(scope["path"], error, _status_of(error))(scope, receive, named)
        except Exception:
            _log.exception("bug", id=call.id, path=call.path)
            if call.status is None:
                await self._refuse(call.path, internal_error(call.id), 500)(scope, receive, named)
        finally:
            end_call(call, self._on_end)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a connection that is no HTTP request on to the application. The sender of a WebSocket is identified
        first. A refused WebSocket is answered over HTTP, so that its client gets the reason."""
        if scope["type"] == "websocket":
            try:
                scope.setdefault("state", {})["identity"] = self._identify(HTTPConnection(scope))
            except Unauthorized as error:
                await refuse_plainly(scope["path"], error, _status_of(error))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _status_of(error: Unauthorized) -> int | None:
    return 403 if isinstance(error, UnknownHost) else None


async def run_while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Run `work` and return its result. Cancel `work` as soon as the client disconnects. Raises
    `RequestCancelled` after a disconnect, and `EngineClosed` if `work` ended because the model was closed."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_until_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestCancelled("the client disconnected")
        if task.cancelled():  # not cancelled here, so the model was closed
            raise EngineClosed("the model was unloaded while the request was prepared")
        return await task
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def id_headers(call: RequestContext) -> list[tuple[bytes, bytes]]:
    """Return the response headers with the request's id, under the names that clients of the path's API read."""
    names = (b"x-request-id", b"request-id") if call.path.startswith(_ANTHROPIC) else (b"x-request-id",)
    return [(name, call.id.encode()) for name in names]


def _naming(call: RequestContext, send: Send) -> Send:
    """Wrap `send` so that it records the status and adds the request's id to the response headers."""
    headers = id_headers(call)

    async def send_named(message: Message) -> None:
        if message["type"] == "http.response.start":
            call.status = message["status"]
            told = [(POLICIES_HEADER, ", ".join(call.policies).encode())] if call.tells_policies else []
            told += [(TRACE_HEADER, call.traced.encode())] if call.traced is not None else []
            message["headers"] = [*message.get("headers", ()), *headers, *told]
        elif call.method == "HEAD":
            message = {**message, "body": b""}
        await send(message)

    return send_named


def end_call(call: RequestContext, on_end: Callable[[RequestContext, float], None]) -> None:
    """Release the resources of a request, log its record, and end its span."""
    call.resources.close()
    on_end(call, time.monotonic() - call.began)
    story: dict[str, Any] = {"id": call.id, "route": call.route, "status": call.status}
    log = _log.debug if call.path.startswith(_QUIET) else _log.info
    log("request", **story, **call.fields())
    if call.span is not None:
        http = {"http.request.method": call.method, "http.route": call.path, "url.path": call.path}
        status = {} if call.status is None else {"http.response.status_code": call.status}
        call.span.end(call, call.operation, http | status)
