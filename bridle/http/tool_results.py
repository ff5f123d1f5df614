"""`POST /v1/tool_results/{call_id}`: a client answers a call that its stream has told of, and the stream goes on."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import ConfigDict
from starlette.responses import Response

from bridle.errors import InvalidRequest
from bridle.http.fields import InnerFields
from bridle.http.state import http_state
from bridle.http.transport.identity import identity_of
from bridle.http.transport.json_body import BoundedRoute
from bridle.tools.functions import as_text

router = APIRouter(route_class=BoundedRoute)


class ToolResultBody(InnerFields):
    """A `result`, text or JSON, or an `error` in words."""

    model_config = ConfigDict(extra="forbid")

    result: Any = None
    error: str | None = None


@router.post("/v1/tool_results/{call_id}", summary="Answer a call of a tool", status_code=204)
async def answer(call_id: str, body: ToolResultBody, request: Request) -> Response:
    """The id is in the name of the variable that told of the call. Each call is answered once, by its own user."""
    if body.error is not None and body.result is not None:
        raise InvalidRequest("both result and error were given; a call has one answer", "error")
    text = "" if body.error is not None else as_text(body.result)
    desk = next((model.tools for model in http_state(request).registry if model.tools is not None), None)
    if desk is None:
        raise InvalidRequest("this server has no tools", "call_id")
    desk.answer(call_id, identity_of(request).user, text, body.error)
    return Response(status_code=204)
