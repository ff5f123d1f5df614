"""Routes for control vectors: every user may list vectors; admins may load, replace and unload them.

The `source` that a client sends is the name of a file in the server's folder of adapters; it is never used as a path.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from bridle.errors import InvalidRequest
from bridle.http.fields import InnerFields
from bridle.http.middleware.identity import check_admin, identity_of
from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.state import borrow, http_state, json_response

if TYPE_CHECKING:
    from bridle.control_vectors import ControlVectorInfo

router = APIRouter(route_class=BoundedRoute)

Name = Annotated[str, Field(min_length=1, max_length=500)]


class VectorBody(InnerFields):
    """Body of a request to load a control vector. `source` is a file in the server's folder of adapters, with or
    without the file's extension; its default is `name`. `model` is the vector's model (default: the server's default
    model)."""

    name: Name
    source: Name | None = None
    model: Name | None = None


@router.get("/v1/control_vectors", summary="List the control vectors of a model")
async def vectors(request: Request, model: str | None = None) -> Response:
    held = await borrow(request, model)
    found = () if held.control_vectors is None else held.control_vectors.list()
    return json_response({"object": "list", "data": [_row(held.name, info, request) for info in found]})


@router.post("/v1/control_vectors", summary="Load a control vector, or replace the one of its name (admins)")
async def load(body: VectorBody, request: Request) -> Response:
    check_admin(request)
    held = await borrow(request, body.model)
    source = http_state(request).registry.adapters.catalog.vector_file(body.source or body.name)
    try:
        info = await asyncio.to_thread(held.require_control_vectors().add, body.name, source)
    except InvalidRequest as error:  # without the path, which clients need not know
        raise InvalidRequest(str(error).replace(str(source), source.name), error.param) from None
    return json_response(_row(held.name, info, request), 201)


@router.get("/v1/control_vectors/{name}", summary="Describe one control vector")
async def vector(name: str, request: Request, model: str | None = None) -> Response:
    held = await borrow(request, model)
    return json_response(_row(held.name, held.require_control_vectors().get(name), request))


@router.delete("/v1/control_vectors/{name}", summary="Unload a control vector (admins)")
async def unload(name: str, request: Request, model: str | None = None) -> Response:
    check_admin(request)
    (await borrow(request, model)).require_control_vectors().remove(name)
    return json_response({"id": name, "object": "control_vector", "deleted": True})


def _row(model: str, info: ControlVectorInfo, request: Request) -> dict[str, Any]:
    """Return a control vector's entry for the list of vectors. Only admins see the vector's path."""
    row: dict[str, Any] = {"id": info.name, "object": "control_vector", "model": model}
    row |= {"layers": list(info.layers), "num_users": info.num_users}
    return row | ({"source": info.source} if identity_of(request).is_admin else {})
