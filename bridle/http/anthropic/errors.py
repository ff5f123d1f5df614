"""Errors in the format that Anthropic's clients expect, with the same HTTP statuses as on all other routes."""

from __future__ import annotations

from typing import Any, ClassVar

from bridle.errors import BridleError
from bridle.http.api_route import ApiRoute
from bridle.http.errors import ERROR_SCHEMA, error_body, status_of

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
    """Return the JSON body of an error. The error's fields `param` and `code` follow the message."""
    status = status or status_of(error)[0]
    inner = error_body(error)["error"]
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": inner | {"type": kind}}


class AnthropicRoute(ApiRoute):
    """A route whose errors have Anthropic's format."""

    schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "required": ["type", "error"],
        "properties": {"type": {"const": "error"}, "error": ERROR_SCHEMA["properties"]["error"]},
    }

    @staticmethod
    def shape(error: BridleError, status: int) -> dict[str, Any]:
        return anthropic_body(error, status)
