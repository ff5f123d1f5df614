"""Errors in the shape that Anthropic's clients expect, with the statuses of all other routes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from bridle.errors import BridleError
from bridle.http.errors import (
    RefusedBody,
    describe_validation,
    error_body,
    json_response,
    note_error,
    retry_headers,
    status_of,
)
from bridle.http.json_body import BoundedRoute

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_body(error: BridleError, status: int | None = None) -> dict[str, Any]:
    """The JSON body of an error. Field and code are told beside the message."""
    status = status or status_of(error)[0]
    inner = error_body(error)["error"]
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": inner | {"type": kind}}


class AnthropicRoute(BoundedRoute):
    """A route whose errors have that shape."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def shaped(request: Request) -> Response:
            try:
                return await handler(request)
            except RequestValidationError as error:
                return _answer(request, describe_validation(error.errors()))
            except RefusedBody as error:
                return _answer(request, error.error, error.status_code)
            except BridleError as error:
                return _answer(request, error)

        return shaped


def _answer(request: Request, error: BridleError, status: int | None = None) -> Response:
    note_error(request, error)
    status = status or status_of(error)[0]
    return json_response(anthropic_body(error, status), status, retry_headers(error))
