"""The state that all routes of an application share, and functions with which routes begin to serve a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from bridle.http.metrics.metrics import Metrics
from bridle.http.middleware.request_context import RequestContext, call_of, run_while_connected
from bridle.http.server.websocket_frontend import WebSocketFrontend
from bridle.http.settings import BODY_BYTES, SEEING_BODY_BYTES, HttpSettings
from bridle.http.writers.pool import WriterPool
from bridle.serving import LoadedModel
from bridle.serving.lifecycle.request_lifecycle import AppState, RequestLifecycle
from bridle.serving.outputs.batch_store import BatchStore
from bridle.serving.outputs.conversation_store import ConversationStore
from bridle.serving.outputs.file_store import FileStore
from bridle.serving.outputs.response_store import ResponseStore
from bridle.serving.state_db import StateDb
from bridle.serving.tenancy.socket_tickets import SocketTickets
from bridle.serving.tracing.trace_store import HEADER, wish_of


@dataclass(slots=True, kw_only=True)
class HttpState(AppState):
    """State that all routes of an application share.

    Stores of clients' data: `responses`, `conversations`, `files` and `batches`, all saved in the file `state_db`.
    `passing` has responses that are not saved; they exist as long as the WebSocket that requested them. Further fields
    are limits, counters, WebSocket `fronts` and their `tickets`, and the `writers` of streams. `started` is a Unix time
    in seconds. With the lock `parsing`, only one large body is parsed at a time, so that parsing does not delay other
    requests.
    """

    settings: HttpSettings
    metrics: Metrics
    num_uploads: int = 0
    num_pulls: int = 0
    fronts: list[WebSocketFrontend] = field(default_factory=list)
    responses: ResponseStore = field(default_factory=ResponseStore)
    passing: ResponseStore = field(default_factory=ResponseStore)
    conversations: ConversationStore = field(default_factory=ConversationStore)
    files: FileStore = field(default_factory=FileStore)
    batches: BatchStore = field(default_factory=BatchStore)
    state_db: StateDb | None = None
    started: int = field(default_factory=lambda: int(time.time()))
    parsing: asyncio.Lock = field(default_factory=asyncio.Lock)
    tickets: SocketTickets = field(default_factory=SocketTickets)
    writers: WriterPool | None = None

    @property
    def is_ready(self) -> bool:
        return self.registry.is_healthy and not self.is_draining

    @property
    def max_body_bytes(self) -> int:
        """Return the current maximum size of a request body in bytes. The default is higher if a model reads images,
        because bodies contain images as text."""
        if self.settings.max_body_bytes is not None:
            return self.settings.max_body_bytes
        return SEEING_BODY_BYTES if any(model.pictures for model in self.registry) else BODY_BYTES

    def add_writers(self, writers: WriterPool) -> None:
        """Set the processes that write streams, and add their metrics."""
        self.writers = writers
        self.metrics.add(writers.collect)

    def end(self, call: RequestContext, seconds: float) -> None:
        """Record that a request has ended after `seconds`."""
        self.metrics.observe(call, seconds)
        self.on_request_end()

    def begin_drain(self, seconds: float = 0.0) -> None:
        """Refuse new generations. Running generations have `seconds` to finish."""
        self.is_draining = True
        for front in self.fronts:
            front.drain(seconds)
        self.on_request_end()

    def save(self) -> None:
        """Write unsaved changes and close the stores. Idempotent; later changes are not saved."""
        self.traces.close()
        if self.state_db is not None:
            self.state_db.close()

    async def close_fronts(self) -> None:
        """Close the connections of all WebSocket front-ends."""
        for front in self.fronts:
            await front.close()


def http_state(request: Request) -> HttpState:
    """Return the state of the application that received the request."""
    state = request.app.state.http
    assert isinstance(state, HttpState)
    return state


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with `content` as JSON. NaN and infinity become null."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def serving_of(request: Request, trace: bool | str | None = None) -> RequestLifecycle:
    """Return the lifecycle object of an HTTP request. `trace` is the value of the request's field `trace`."""
    http, call = http_state(request), call_of(request.scope)
    wish = wish_of(request.headers, trace) if trace is not None or HEADER in request.headers else "no"
    settings = http.settings
    return RequestLifecycle(http, call, call.resources, settings.load_timeout, settings.request_timeout, wish)


async def borrow(request: Request, name: str | None) -> LoadedModel:
    """Return the model with this name, or the base model of the adapter with this name. The model stays loaded until
    the request ends. If the client disconnects, the wait for the model ends."""
    return await run_while_connected(request.receive, serving_of(request).acquire_model_for_metadata(name))
