"""Routes for LoRA adapters: every user may list adapters; admins may load and unload them.

`/v1/adapters` is bridle's route; `/v1/load_lora_adapter` and `/v1/unload_lora_adapter` are vLLM's routes for the same
actions. The `source` that a client sends is looked up in the list of allowed adapters, and never used as a path.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from bridle.errors import UnknownModel
from bridle.http.fields import InnerFields
from bridle.http.middleware.identity import check_admin, identity_of
from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.middleware.request_context import run_while_connected
from bridle.http.state import borrow, http_state, json_response
from bridle.serving import LoadedModel
from bridle.serving.models.model_slot import Slot

_MAX_CHARS = 500

router = APIRouter(route_class=BoundedRoute)

Name = Annotated[str, Field(min_length=1, max_length=_MAX_CHARS)]


class AdapterBody(InnerFields):
    """Body of a request to load an adapter. `source` is a folder in the server's folder of adapters, or an allowed hub
    id; its default is `name`. `model` is the base model (default: the server's default model). If `replace` is true,
    the new adapter replaces a loaded adapter of the same name."""

    name: Name
    source: Name | None = None
    revision: Name | None = None
    model: Name | None = None
    replace: bool = False


class LoadBody(InnerFields):
    """Body of vLLM's route that loads an adapter."""

    lora_name: Name
    lora_path: Name
    base_model_name: Name | None = None
    load_inplace: bool | None = None


class UnloadBody(InnerFields):
    """Body of vLLM's route that unloads an adapter."""

    lora_name: Name
    lora_int_id: int | None = None


@router.get("/v1/adapters", summary="List the LoRA adapters, loaded or not")
async def adapters(request: Request, model: str | None = None) -> Response:
    registry = http_state(request).registry
    wanted = None if model is None else registry.slot_of(model).name
    rows = [
        _row(registry.slot_of(owner), name, request)
        for owner, name in await registry.all_adapters()
        if wanted in (None, owner)
    ]
    return json_response({"object": "list", "data": rows})


@router.post("/v1/adapters", summary="Load a LoRA adapter (admins)")
async def load(body: AdapterBody, request: Request) -> Response:
    check_admin(request)
    held = await borrow(request, body.model)
    await _load(request, held, body.name, body.source or body.name, body.revision, replaces=body.replace)
    return json_response(_row(http_state(request).registry.slot_of(held.name), body.name, request), 201)


@router.get("/v1/adapters/{name:path}", summary="Describe one LoRA adapter")
async def adapter(name: str, request: Request, model: str | None = None) -> Response:
    registry = http_state(request).registry
    held = await _owner(request, name, model)
    if registry.adapters.catalog.find(name) is None:
        held.adapters.get(name)  # raises, with the names that there are
    return json_response(_row(registry.slot_of(held.name), name, request))


@router.delete("/v1/adapters/{name:path}", summary="Unload a LoRA adapter (admins)")
async def unload(name: str, request: Request, model: str | None = None) -> Response:
    check_admin(request)
    (await _owner(request, name, model)).adapters.remove(name)
    return json_response({"id": name, "object": "adapter", "deleted": True})


@router.post("/v1/load_lora_adapter", summary="Load a LoRA adapter (admins; vLLM's form)")
async def load_lora_adapter(body: LoadBody, request: Request) -> Response:
    check_admin(request)
    held = await borrow(request, body.base_model_name)
    await _load(request, held, body.lora_name, body.lora_path, replaces=bool(body.load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", summary="Unload a LoRA adapter (admins; vLLM's form)")
async def unload_lora_adapter(body: UnloadBody, request: Request) -> Response:
    check_admin(request)
    (await _owner(request, body.lora_name, None)).adapters.remove(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _owner(request: Request, name: str, model: str | None) -> LoadedModel:
    """Return the base model of an adapter: the requested model, else the model that has the adapter, else the
    default."""
    if model is not None:
        return await borrow(request, model)
    try:
        return await borrow(request, name)
    except UnknownModel:
        return await borrow(request, None)


async def _load(
    request: Request, model: LoadedModel, name: str, source: str, revision: str | None = None, *, replaces: bool = False
) -> None:
    """Load an adapter for a model. Raises an error if the adapter is invalid."""
    http = http_state(request)
    http.check_open()
    await run_while_connected(
        request.receive, http.registry.adapters.load(model, name, source, revision, replaces=replaces)
    )


def _row(slot: Slot, name: str, request: Request) -> dict[str, Any]:
    """Return an adapter's entry for the list of adapters. Only admins see the adapter's path."""
    row: dict[str, Any] = {"id": name, "object": "adapter", "model": slot.name, "state": "loadable"}
    is_admin = identity_of(request).is_admin
    if slot.model is None or name not in slot.model.adapters:
        failure = http_state(request).registry.adapters.failure_of(slot.name, name)
        if failure is not None:
            row |= {"state": "failed"} | ({"error": str(failure)} if is_admin else {})
        return row
    info = slot.model.adapters.get(name)
    row |= {
        "state": info.state,
        "rank": info.rank,
        "targets": list(info.targets),
        "num_bytes": info.num_bytes,
        "num_users": info.num_users,
    }
    if is_admin:
        row |= {"source": info.source, "revision": info.revision, "error": info.error}
    return row
