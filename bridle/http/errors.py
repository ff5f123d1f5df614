"""Converts errors to HTTP responses: a body in OpenAI's format, with the error types of OpenAI and
text-generation-inference.

This module handles the errors of all routes and of the web framework, so that a client always finds `error.message`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from bridle.compat.routes import ROUTES
from bridle.error_mapping import ErrorKind, error_text, failure_of, retry_after
from bridle.errors import BridleError, ControllerError, InternalError, InvalidRequest, RequestCancelled
from bridle.safe_repr import short_repr

#: For each kind of error: OpenAI's error type and the error type of text-generation-inference.
_WORDS: dict[ErrorKind, tuple[str, str]] = {
    ErrorKind.UNAUTHORIZED: ("authentication_error", "authentication"),
    ErrorKind.INVALID: ("invalid_request_error", "validation"),
    ErrorKind.TEMPLATE: ("invalid_request_error", "template_error"),
    ErrorKind.CONTROLLER: ("controller_error", "generation"),
    ErrorKind.OVERLOADED: ("rate_limit_error", "overloaded"),
    ErrorKind.BUSY: ("server_error", "overloaded"),
    ErrorKind.LOST: ("server_error", "generation"),
    ErrorKind.CANCELLED: ("cancelled", "incomplete_generation"),
    ErrorKind.LATE: ("timeout_error", "incomplete_generation"),
    ErrorKind.BUG: ("server_error", "generation"),
}

_OPENAI_ERROR = {
    "message": {"type": "string"},
    "type": {"type": "string"},
    "param": {"type": ["string", "null"]},
    "code": {"type": "string"},
}
#: The schema of an error body in OpenAI's shape.
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error", "error_type"],
    "properties": {
        "error": {"type": "object", "required": [*_OPENAI_ERROR], "properties": _OPENAI_ERROR},
        "error_type": {"type": "string"},
    },
}

#: A function that answers an error for which no route ran. Its arguments are the path, the error, and the HTTP status
#: (None: the error's usual status).
Refuse = Callable[[str, BridleError, int | None], Response]


class RefusedBody(HTTPException):
    """Raised for a request body that was not read to its end, or is not JSON. `error` is the cause."""

    def __init__(self, status_code: int, error: BridleError) -> None:
        super().__init__(status_code, str(error))
        self.error = error


def status_of(error: BridleError) -> tuple[int, str]:
    """Return the HTTP status code and OpenAI's error type of an error."""
    failure = failure_of(error)
    return failure.status, _WORDS[failure.kind][0]


def error_type_of(error: BridleError) -> str:
    """Return the error type that text-generation-inference has for an error."""
    return _WORDS[failure_of(error).kind][1]


def error_body(error: BridleError, kind: str | None = None) -> dict[str, Any]:
    """Return the JSON body of an error, in OpenAI's format. A controller's error also has the controller's last `logs`.

    On every route, the body also has the field `error_type`, for clients of text-generation-inference.
    """
    openai_type, native_type = _WORDS[failure_of(error).kind]
    text = error_text(error, hides_bugs=False).encode("utf-8", "replace").decode()  # JSON has no lone surrogates
    inner = {"message": text, "type": kind or openai_type, "param": getattr(error, "param", None), "code": error.code}
    body: dict[str, Any] = {"error": inner, "error_type": native_type}
    if isinstance(error, ControllerError) and error.logs:
        body["error"]["logs"] = error.logs
    return body


def error_response(error: BridleError, status: int | None = None) -> Response:
    """Return a response with an error; `status` overrides the error's usual HTTP status."""
    content = msgspec.json.encode(error_body(error))
    return Response(content, status or status_of(error)[0], retry_headers(error), media_type="application/json")


def retry_headers(error: BridleError) -> dict[str, str]:
    """Return the header `Retry-After` if the error is temporary, else no header."""
    seconds = retry_after(error)
    return {} if seconds is None else {"Retry-After": str(max(round(seconds), 1))}


def described(schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of error responses. `schema` is the JSON schema of the error bodies."""
    content = {"application/json": {"schema": schema}}
    return {
        "4XX": {"description": "The request was refused; the message has the value and the limit", "content": content},
        "5XX": {"description": "The server failed, or cannot answer now", "content": content},
    }


def refuse_plainly(path: str, error: BridleError, status: int | None = None) -> Response:
    """Return an error response in OpenAI's format, for any path."""
    return error_response(error, status)


def internal_error(request_id: str) -> InternalError:
    """Return the error that a client gets if the server has a bug. The error hides the cause, and names the request id
    in the log."""
    return InternalError(f"internal error; the server's log has more under request id {request_id}")


def install_error_handlers(app: FastAPI, refuse: Refuse = refuse_plainly) -> None:
    """Install the handlers for all errors. A route's error has the format of the route; `refuse` answers errors of the
    web framework."""

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _answer_http_error(request, error, refuse)

    app.add_exception_handler(BridleError, _on_bridle_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)


def note_error(request: Request, error: BridleError) -> None:
    """Record the error for the request's log line."""
    call = request.scope.get("state", {}).get("call")
    if call is not None:
        call.error = error


def describe_validation(errors: Any) -> InvalidRequest:
    """Convert the first of pydantic's errors to one sentence about one field."""
    first = errors[0] if errors else {}
    path = [str(part) for part in first.get("loc", ()) if part != "body"]
    param = ".".join(path) or None
    if first.get("type") == "missing":
        return InvalidRequest(f"{param or 'the request body'} is required", param)
    if isinstance(first.get("input"), bytes):
        return InvalidRequest("the request body must be JSON, sent with 'Content-Type: application/json'")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequest):  # the error is about a field that the path does not name
        cause.param = ".".join([*path, *([cause.param] if cause.param else [])]) or None
        return cause
    message = str(first.get("msg", "invalid request")).removeprefix("Value error, ")
    if first.get("type") == "value_error":
        return InvalidRequest(message, param)
    found = short_repr(first.get("input"))
    return InvalidRequest(f"{param or 'the request body'} is {found}; {message[:1].lower() + message[1:]}", param)


async def _on_bridle_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BridleError)
    note_error(request, error)
    return error_response(error)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """Record a client that disconnects before its whole body arrived. The client does not get the response."""
    return await _on_bridle_error(request, RequestCancelled("the client went away"))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    described = describe_validation(error.errors())
    note_error(request, described)
    return error_response(described)


def _instead(path: str) -> str:
    """Return the route to use instead of another server's route."""
    whys = dict.fromkeys(route.why for route in ROUTES if route.path == path and route.why)
    return "; ".join(whys) or "see /docs"


def _answer_http_error(request: Request, error: HTTPException, refuse: Refuse) -> Response:
    if isinstance(error, RefusedBody):
        note_error(request, error.error)
        response = error_response(error.error, error.status_code)
        if error.status_code in (408, 413, 415):  # do not read the rest of the body
            response.headers["connection"] = "close"
        return response
    path = request.url.path
    message = {
        404: f"there is no {request.method} {path[:200]} here; {_instead(path)}",
        405: f"{path[:200]} does not accept {request.method}",
    }.get(error.status_code, str(error.detail))
    refusal = InvalidRequest(message)
    refusal.code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    response = refuse(path, refusal, error.status_code)
    response.headers.update(error.headers or {})
    return response
