"""Serves responses over a WebSocket at `/v1/responses`: each client message requests a response, and each event is one
message.

A connection runs one response at a time, in the order of its requests. A response that is not stored can be continued
on the same connection, until the next response or a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec
import structlog
from fastapi.exceptions import RequestValidationError
from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send

from bridle.errors import BridleError, EngineClosed, InvalidRequest, ProtocolError, UnknownResponse
from bridle.http.api_route import checked_body
from bridle.http.errors import RefusedBody, describe_validation, error_body, internal_error, status_of
from bridle.http.fields import STRICTNESS
from bridle.http.middleware.identity import identity_of
from bridle.http.middleware.json_body import parsed
from bridle.http.middleware.request_context import RequestContext, end_call
from bridle.http.openai.responses.items import Event
from bridle.http.openai.responses.response_writer import ResponseWriter, begin
from bridle.http.openai.responses.schemas import ResponsesBody
from bridle.http.state import HttpState
from bridle.safe_repr import short_repr
from bridle.serving import new_request_id
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
from bridle.serving.lifecycle.request_record import trace_headers
from bridle.serving.tenancy.allowed_origins import may_connect
from bridle.serving.tenancy.loop_throttle import RateBudget
from bridle.serving.tracing.trace_store import wish_of

_log: structlog.stdlib.BoundLogger = structlog.get_logger("bridle.http")
PATH = "/v1/responses"
#: The maximum duration of a connection in seconds, and of messages that wait for earlier responses.
MAX_SECONDS, MAX_WAITING = 3_600.0, 8
_GOING_AWAY, _POLICY_VIOLATION = 1001, 1008  # close codes of WebSockets
#: Message fields that HTTP requests do not have, or that have no effect here.
_BESIDE = ("type", "stream", "stream_options", "generate")


class ConnectionExpired(ProtocolError):
    """Raised when a connection has reached its maximum duration."""

    code = "websocket_connection_limit_reached"


class PreviousNotFound(InvalidRequest):
    """Raised if the previous response is neither stored nor the last response of the connection."""

    code = "previous_response_not_found"


class ResponsesSockets:
    """The ASGI application that serves all WebSocket connections."""

    paths = (PATH,)

    def __init__(self, http: HttpState) -> None:
        self._http = http
        self._open: set[_Connection] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings = self._http.settings
        if not may_connect(scope["headers"], settings.cors_origins):
            await send(
                {"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": "pages of this origin may not connect"}
            )
            return
        await receive()  # receives `websocket.connect`
        await send({"type": "websocket.accept"})
        head = HTTPConnection(scope)
        STRICTNESS.set((head.headers, settings.strict_fields))
        connection = _Connection(self._http, head, receive, send)
        self._open.add(connection)
        try:
            await connection.serve(MAX_SECONDS)
        finally:
            self._open.discard(connection)

    def drain(self, seconds: float) -> None:
        """Refuse new responses. Running responses have `seconds` to finish."""
        for connection in self._open:
            connection.end()

    async def close(self) -> None:
        """Cancel all responses, and report the shutdown to the clients."""
        for connection in list(self._open):
            connection.end(EngineClosed("the server was shut down"))


class _Connection:
    """The WebSocket connection of one client."""

    def __init__(self, http: HttpState, head: HTTPConnection, receive: Receive, send: Send) -> None:
        self._http, self._head, self._identity = http, head, identity_of(head)
        self._receive, self._send = receive, send
        self._messages: asyncio.Queue[str | bytes | None] = asyncio.Queue()  # None: no further message comes
        self._work: asyncio.Task[None] | None = None
        self._num_waiting = 0  # bytes of waiting messages
        self._useless = RateBudget()
        self._last: str | None = None  # the last response, if it is not stored
        self._error: BridleError | None = None  # why the connection ends
        self._is_over = False

    # -- connection ------------------------------------------------------------------------------------------------

    async def serve(self, max_seconds: float) -> None:
        """Answer messages until the client disconnects or the connection reaches its maximum duration."""
        reader = asyncio.create_task(self._read())
        timer = asyncio.get_running_loop().call_later(max_seconds, self._expire, max_seconds)
        try:
            while not self._is_over and (message := await self._messages.get()) is not None:
                self._num_waiting -= len(message)
                self._work = asyncio.create_task(self._answer(message))
                await asyncio.wait({self._work})
                if self._work.cancelled() and not self._is_over:
                    self.end(EngineClosed("the model was closed"))
                self._work = None
            await self._leave()
        finally:
            timer.cancel()
            reader.cancel()
            if self._work is not None:
                self._work.cancel()
            self._forget()

    def end(self, error: BridleError | None = None) -> None:
        """Close the connection when the running response has ended. With an `error`, close at once and send the
        error."""
        self._is_over, self._error = True, error
        self._messages.put_nowait(None)
        if error is not None and self._work is not None:
            self._work.cancel()

    def _expire(self, max_seconds: float) -> None:
        self.end(ConnectionExpired(f"a connection lasts for {max_seconds:g} s; open another one"))

    async def _read(self) -> None:
        """Read messages, also while a response runs, so that the server notices a disconnect."""
        while (event := await self._receive())["type"] != "websocket.disconnect":
            message = event.get("text") or event.get("bytes") or ""
            self._num_waiting += len(message)
            if self._messages.qsize() >= MAX_WAITING or self._num_waiting > self._http.max_body_bytes:
                self.end(ProtocolError("too many messages are waiting; request one response after another"))
                return
            self._messages.put_nowait(message)
        self._is_over = True
        self._messages.put_nowait(None)
        if self._work is not None:
            self._work.cancel()

    async def _leave(self) -> None:
        """Close the connection with the reason, unless the client has disconnected."""
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            if self._error is not None:
                await self._tell([_failure(self._error)])
            code = _POLICY_VIOLATION if isinstance(self._error, ProtocolError) else _GOING_AWAY
            await self._send({"type": "websocket.close", "code": code, "reason": ""})

    async def _tell(self, events: list[Event]) -> None:
        """Send events. Raises `TimeoutError` if the client reads too slowly."""
        async with asyncio.timeout(self._http.settings.send_timeout):
            for event in events:
                await self._send({"type": "websocket.send", "text": msgspec.json.encode(event).decode()})

    def _forget(self) -> None:
        if self._last is not None:
            with contextlib.suppress(UnknownResponse):  # the response has expired
                self._http.passing.delete(self._identity.user, self._last)
        self._last = None

    # -- a response ------------------------------------------------------------------------------------------------

    async def _answer(self, message: str | bytes) -> None:
        """Answer one message. Every error is reported to the client or logged."""
        call = RequestContext(id=new_request_id(), route=f"WEBSOCKET {PATH}", method="WEBSOCKET", path=PATH)
        call.identity = self._identity
        if self._http.tracing is not None:
            call.span = self._http.tracing.begin(trace_headers(self._head.scope["headers"]))
        try:
            await self._respond(message, call)
            call.status = 200
        except (OSError, RuntimeError, TimeoutError) as error:  # how ASGI servers report that the peer is gone
            self._is_over, call.status = True, 499
            _log.debug("client gone", id=call.id, error=str(error))
        except Exception:
            _log.exception("bug", id=call.id, path=PATH)
            call.status = 500
            await self._fail(internal_error(call.id), call)
        finally:
            end_call(call, self._http.end)

    async def _respond(self, message: str | bytes, call: RequestContext) -> None:
        answer: ResponseWriter | None = None
        try:
            answer = await self._begin(*await self._body(message), call)
            await answer.stream(self._tell)
            self._forget()
            self._last = None if answer.is_stored else answer.id
        except BridleError as error:
            self._forget()
            call.error = error
            await self._fail(error, call, answer)

    async def _fail(self, error: BridleError, call: RequestContext, answer: ResponseWriter | None = None) -> None:
        """Report an error to the client. If the response has begun, the error is in the event of the failed
        response."""
        call.status = status_of(error)[0]
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            await self._tell([_failure(error) if answer is None else answer.failure(error)])
        try:
            self._useless.charge("requests that failed")
        except ProtocolError as too_many:
            self.end(too_many)

    async def _body(self, message: str | bytes) -> tuple[ResponsesBody, bool]:
        """Parse the request in a message. Also returns whether the request generates text. Raises `InvalidRequest`."""
        data = message.encode("utf-8", "replace") if isinstance(message, str) else message
        try:
            fields = await parsed(self._http, data)
            if not isinstance(fields, Mapping) or fields.get("type") != "response.create":
                kind = fields.get("type") if isinstance(fields, Mapping) else fields
                raise InvalidRequest(f"type is {short_repr(kind)}; must be 'response.create'", "type")
            given = {name: value for name, value in fields.items() if name not in _BESIDE}
            return checked_body(ResponsesBody, {**given, "stream": True}), fields.get("generate") is not False
        except RefusedBody as error:
            raise error.error from None
        except RequestValidationError as error:
            raise describe_validation(error.errors()) from None

    async def _begin(self, body: ResponsesBody, generates: bool, call: RequestContext) -> ResponseWriter:
        http, previous = self._http, body.previous_response_id
        book = http.passing if previous is not None and previous == self._last else http.responses
        try:
            said = body.items(book, http.conversations, self._identity.user)
        except UnknownResponse as error:
            raise PreviousNotFound(str(error), "previous_response_id") from None
        thread = body.turn(http.conversations, self._identity.user)
        body = body.model_copy(update={"input": said})
        asked = body if generates else body.model_copy(update={"max_output_tokens": 1})
        times = http.settings.load_timeout, http.settings.request_timeout
        wish = wish_of(self._head.headers, body.trace)
        generation, turn = await begin(asked, RequestLifecycle(http, call, call.resources, *times, wish))
        books = http.responses, http.passing
        return ResponseWriter(generation, turn, body, call.id, *books, not generates, thread)


def _failure(error: BridleError) -> dict[str, Any]:
    """Return the event that reports a refused request."""
    return {"type": "error", "status": status_of(error)[0], **error_body(error)}
