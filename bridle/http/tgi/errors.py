"""Errors on the native routes: `{"error": text, "error_type": word}`, always as JSON, with the original's statuses."""

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
    error_type_of,
    json_response,
    note_error,
    retry_headers,
    status_of,
)
from bridle.http.json_body import BoundedRoute

_PREFIX = {
    "validation": "Input validation error: ",
    "generation": "Request failed during generation: ",
}
_REPLACED = {400: 422, 422: 424, 500: 424}


def native_body(error: BridleError) -> dict[str, Any]:
    """The JSON body of an error; what a controller printed last comes as `logs`."""
    kind = error_type_of(error)
    inner = error_body(error)["error"]
    body = {"error": _PREFIX.get(kind, "") + inner["message"], "error_type": kind}
    return body | {"logs": inner["logs"]} if "logs" in inner else body


class NativeRoute(BoundedRoute):
    """A route whose errors have the native shape."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def native(request: Request) -> Response:
            try:
                return await handler(request)
            except RequestValidationError as error:
                return _answer(request, describe_validation(error.errors()))
            except RefusedBody as error:
                return _answer(request, error.error, error.status_code)
            except BridleError as error:
                return _answer(request, error)

        return native


def _answer(request: Request, error: BridleError, status: int | None = None) -> Response:
    note_error(request, error)
    if status is None:
        usual = status_of(error)[0]
        status = _REPLACED.get(usual, usual)
    response = json_response(native_body(error), status, retry_headers(error))
    if status in (408, 413):  # the rest of the body is not worth reading
        response.headers["connection"] = "close"
    return response
