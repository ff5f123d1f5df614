"""Routes for a user's own requests: the trace of a request, answers to tool calls, and tickets for WebSockets."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import ConfigDict
from starlette.responses import Response

from bridle.http.fields import InnerFields
from bridle.http.middleware.identity import identity_of
from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.state import http_state, json_response
from bridle.serving.outputs.direct_tools import answer_call, desks_of
from bridle.serving.tenancy.socket_tickets import TICKET_SECONDS

router = APIRouter(route_class=BoundedRoute)


class ToolResultBody(InnerFields):
    """Body with the answer to a tool call: a `result`, as text or JSON, or an `error` message."""

    model_config = ConfigDict(extra="forbid")

    result: Any = None
    error: str | None = None


@router.get("/v1/traces/{request_id}", summary="The trace of a request")
async def trace(request_id: str, request: Request) -> Response:
    """Return a trace as JSON lines. `request_id` is the value of the response header `x-request-id`. Traces are kept
    for some minutes."""
    text = await http_state(request).traces.find(request_id, identity_of(request).user)
    return Response(text, media_type="application/x-ndjson")


@router.post("/v1/tool_results/{call_id}", summary="Answer a call of a tool", status_code=204)
async def answer(call_id: str, body: ToolResultBody, request: Request) -> Response:
    """Answer a tool call. `call_id` is in the name of the variable that reported the call. Each call can be answered
    only once, and only by its user."""
    models = http_state(request).registry
    answer_call(models, identity_of(request).user, call_id, body.result, body.error)
    return Response(status_code=204)


@router.get("/v1/tool_results", summary="Calls of tools that wait for an answer")
async def list_calls(request: Request) -> Response:
    """List the user's waiting tool calls, oldest first, at most 100 of each model."""
    user = identity_of(request).user
    asked = [each for desk in desks_of(http_state(request).registry) for each in desk.asked_of(user)]
    data = [{"id": call_id, "object": "tool_call", **msgspec.json.decode(notice)} for call_id, notice in asked]
    return json_response({"object": "list", "data": data})


@router.post("/v1/websocket_tickets", summary="Get a ticket for one WebSocket")
async def issue(request: Request) -> Response:
    """Return a ticket for pages and programs that cannot send a key over a WebSocket, and connect to `/?ticket=TICKET`
    instead. A ticket opens one connection as the user whose key requested the ticket."""
    ticket = http_state(request).tickets.issue(identity_of(request))
    response = json_response({"object": "websocket_ticket", "ticket": ticket, "expires_in": TICKET_SECONDS})
    response.headers["cache-control"] = "no-store"
    return response
