"""Routes by which an operator pauses and resumes a model."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from bridle.http.fields import InnerFields
from bridle.http.middleware.identity import check_admin
from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.state import borrow, json_response

router = APIRouter(route_class=BoundedRoute)


class PauseBody(InnerFields):
    """Body of a request to pause a model (default: the server's default model). With mode `keep` running requests wait;
    with mode `abort` they are cancelled."""

    model: Annotated[str | None, Field(max_length=500)] = None
    mode: Literal["keep", "abort"] = "keep"


class ResumeBody(InnerFields):
    """Body of a request to resume a model (default: the server's default model)."""

    model: Annotated[str | None, Field(max_length=500)] = None


@router.post("/v1/pause", summary="Pause a model: compute nothing until it is resumed (admins)")
async def pause(body: PauseBody, request: Request) -> Response:
    check_admin(request)
    held = await borrow(request, body.model)
    held.pause(cancels=body.mode == "abort")
    return json_response({"model": held.name, "paused": True})


@router.post("/v1/resume", summary="Resume a paused model (admins)")
async def resume(body: ResumeBody, request: Request) -> Response:
    check_admin(request)
    held = await borrow(request, body.model)
    held.resume()
    return json_response({"model": held.name, "paused": False})


@router.get("/v1/pause", summary="Tell whether a model is paused")
async def paused(request: Request, model: str | None = None) -> Response:
    held = await borrow(request, model)
    return json_response({"model": held.name, "paused": held.is_paused})
