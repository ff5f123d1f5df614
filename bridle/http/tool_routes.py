"""Routes with which users call the server's tools, if the operator allows that for a tool."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from bridle.http.fields import InnerFields
from bridle.http.middleware.identity import identity_of
from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.middleware.request_context import run_while_connected
from bridle.http.state import http_state, json_response
from bridle.serving.outputs.direct_tools import call_tool, list_tools

router = APIRouter(route_class=BoundedRoute)


class ToolCallBody(InnerFields):
    """Body with the name of a tool, as `GET /v1/tools` lists it, and the tool's arguments by name."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=300)]
    arguments: dict[str, Any] = Field(default_factory=dict)


@router.get("/v1/tools", summary="List the tools that you may call")
async def tools(request: Request) -> Response:
    rows = list_tools(http_state(request).registry, identity_of(request))
    return json_response({"object": "list", "data": await run_while_connected(request.receive, rows)})


@router.post("/v1/tools/call", summary="Call a tool of the server")
async def call(body: ToolCallBody, request: Request) -> Response:
    """Call a tool. The response has a `result` as text, or an `error` message."""
    work = call_tool(http_state(request).registry, identity_of(request), body.name, body.arguments)
    return json_response(await run_while_connected(request.receive, work))
