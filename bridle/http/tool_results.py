"""`POST /v1/tool_results/{call_id}`: a client answers a call that its stream has told of, and the stream goes on.
`GET /v1/tool_results` lists what waits, for those whose stream tells of no calls, or who have none."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import ConfigDict
from starlette.responses import Response

from bridle.errors import InvalidRequest
from bridle.http.errors import json_response
from bridle.http.fields import InnerFields
from bridle.http.state import http_state
from bridle.http.transport.identity import identity_of
from bridle.http.transport.json_body import BoundedRoute
from bridle.shown import shown
from bridle.tools import ToolDesk
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
    user, desks = identity_of(request).user, _desks(request)
    desk = next((desk for desk in desks if desk.waits_for(call_id, user)), None)
    if desk is None:
        raise InvalidRequest(f"no call {shown(call_id)} waits for an answer of this user's", "call_id")
    desk.answer(call_id, user, text, body.error)
    return Response(status_code=204)


@router.get("/v1/tool_results", summary="Calls of tools that wait for an answer")
async def list_calls(request: Request) -> Response:
    """The user's own, the oldest first; a hundred of each model at most."""
    user = identity_of(request).user
    asked = [each for desk in _desks(request) for each in desk.asked_of(user)]
    data = [{"id": call_id, "object": "tool_call", **msgspec.json.decode(notice)} for call_id, notice in asked]
    return json_response({"object": "list", "data": data})


def _desks(request: Request) -> list[ToolDesk]:
    """The desks of all models that are loaded; mostly they share one."""
    found = {id(model.tools): model.tools for model in http_state(request).registry if model.tools is not None}
    return list(found.values())
