"""Reads request bodies of Ollama's API, and formats its errors.

Ollama reads every body as JSON, and the examples in its documentation send no content type. A browser may send a body
without a content type from any page, without a CORS preflight. So requests from pages of another origin are refused.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from fastapi import Request
from pydantic import BaseModel

from bridle.errors import BridleError, Unauthorized, UnknownModel
from bridle.http.api_route import ApiRoute, checked_body
from bridle.http.errors import RefusedBody, error_body
from bridle.http.ollama.options import with_options
from bridle.http.state import http_state
from bridle.model.library import find_entry
from bridle.serving import ModelRegistry
from bridle.serving.tenancy.allowed_origins import may_connect

Body = TypeVar("Body", bound=BaseModel)


def ollama_error(error: BridleError, status: int | None = None) -> dict[str, Any]:
    """Return the JSON body of an error."""
    return {"error": error_body(error)["error"]["message"]}


class OllamaRoute(ApiRoute):
    """A route whose errors have Ollama's format."""

    schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string"}},
    }

    @staticmethod
    def shape(error: BridleError, status: int) -> dict[str, Any]:
        return ollama_error(error, status)


async def read_body(kind: type[Body], request: Request) -> Body:
    """Read and validate the body of a request. The body's `options` are merged into the fields."""
    is_json = request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
    if not is_json and not may_connect(request.headers.raw, http_state(request).settings.cors_origins):
        raise RefusedBody(403, Unauthorized("a page of another origin must send its body as application/json"))
    return checked_body(kind, with_options(await request.json()))


def described(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a request body."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def served_name(registry: ModelRegistry, name: str | None) -> str | None:
    """Return the name that the registry has for a model. Accepts the suffix `:latest` and other names of pulled models.
    Any other name, such as an adapter's, stays unchanged."""
    if not name:
        return None
    entry = find_entry(name)
    for each in (name, name.removesuffix(":latest"), entry.name if entry is not None else name):
        try:
            registry.slot_of(each)
        except UnknownModel:
            continue
        return each
    return name
