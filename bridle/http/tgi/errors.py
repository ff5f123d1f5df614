"""Formats errors for text-generation-inference's routes: `{"error": text, "error_type": word}`, always as JSON, with
the original server's HTTP statuses."""

from __future__ import annotations

from typing import Any, ClassVar

from bridle.errors import BridleError, Unauthorized
from bridle.http.api_route import ApiRoute
from bridle.http.errors import error_body, error_type_of

_PREFIX = {
    "validation": "Input validation error: ",
    "generation": "Request failed during generation: ",
    "template_error": "Template error: ",
}
_REPLACED = {400: 422, 422: 424, 500: 424}


def native_body(error: BridleError) -> dict[str, Any]:
    """Return the JSON body of an error. For an error of a controller, `logs` has the end of the controller's log."""
    kind = error_type_of(error)
    inner = error_body(error)["error"]
    prefix = "" if isinstance(error, Unauthorized) else _PREFIX.get(kind, "")
    body = {"error": prefix + inner["message"], "error_type": kind}
    return body | {"logs": inner["logs"]} if "logs" in inner else body


class TgiRoute(ApiRoute):
    """A route whose errors have text-generation-inference's format."""

    schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "required": ["error", "error_type"],
        "properties": {"error": {"type": "string"}, "error_type": {"type": "string"}},
    }

    @staticmethod
    def shape(error: BridleError, status: int) -> dict[str, Any]:
        return native_body(error)

    @staticmethod
    def status(usual: int) -> int:
        return _REPLACED.get(usual, usual)
