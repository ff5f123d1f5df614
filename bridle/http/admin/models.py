"""Routes for models: every user may list the loaded and loadable models; admins may load and unload them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from bridle.chat.chat_format import chat_format
from bridle.errors import InvalidRequest, ModelUnavailable
from bridle.http.anthropic.models import anthropic_list, anthropic_row, is_anthropic
from bridle.http.errors import error_response
from bridle.http.fields import InnerFields
from bridle.http.middleware.identity import check_admin
from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.state import HttpState, borrow, http_state, json_response
from bridle.serving import LoadedModel, ModelState

_MAX_NAME_CHARS = 500

router = APIRouter(route_class=BoundedRoute)


class ModelBody(InnerFields):
    """Body with the name of the model to load or unload."""

    model: Annotated[str, Field(min_length=1, max_length=_MAX_NAME_CHARS)]


@router.get("/v1/models", summary="List the models, loaded or not")
async def models(request: Request) -> Response:
    http = http_state(request)
    rows = [await _row(http, name) for name in await http.registry.all_names()]
    rows += [await _adapter_row(http, *each) for each in await http.registry.all_adapters()]
    if is_anthropic(request):
        return json_response(anthropic_list(rows))
    return json_response({"object": "list", "data": rows})


@router.post("/v1/models/load", summary="Load a model and keep it (admins)")
async def load(body: ModelBody, request: Request) -> Response:
    check_admin(request)
    await borrow(request, body.model)
    return json_response(await _row(http_state(request), body.model))


@router.post("/v1/models/unload", summary="Close a model that nobody uses (admins)")
async def unload(body: ModelBody, request: Request) -> Response:
    check_admin(request)
    http = http_state(request)
    try:
        await http.registry.unload(body.model)
    except ModelUnavailable as error:  # a request uses the model
        return error_response(error, 409)
    return json_response(await _row(http, body.model))


@router.get("/v1/models/{name:path}", summary="Describe one model")
async def model(name: str, request: Request) -> Response:
    http = http_state(request)
    base, adapter = http.registry.choose(name)
    row = await _row(http, name) if adapter is None else await _adapter_row(http, base or "", adapter)
    return json_response(anthropic_row(row) if is_anthropic(request) else row)


async def _row(http: HttpState, name: str) -> dict[str, Any]:
    """Return a model's entry for the list, in OpenAI's format. `state` says whether the model is loaded."""
    slot = http.registry.slot_of(name)
    row: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": http.started if slot.model is None else slot.model.created,
        "owned_by": "bridle",
        "root": slot.name,
        "parent": None,
        "max_model_len": None if slot.model is None else slot.model.max_sequence_tokens,
        "default_max_tokens": http.default_max_tokens,
        "state": slot.state.value,
        "task": None if slot.model is None else slot.model.info.task,
        "has_chat_template": None if slot.model is None else slot.model.tokenizer.chat_template.is_present,
        "chat_format": await _chat_format(slot.model),
        "reads_pictures": None if slot.model is None else "image" in slot.model.modalities,
        "input_modalities": None if slot.model is None else ["text", *slot.model.modalities],
    }
    if slot.model is not None and slot.model.pooling is not None:
        row |= _pooling(slot.model)
    if slot.state is ModelState.LOADING:
        row["loading"] = {"stage": slot.stage, "share": round(slot.share, 3)}
    return row


async def _chat_format(model: LoadedModel | None) -> dict[str, Any] | None:
    """Return a model's formats of tool calls and reasoning. Returns None if the model has no chat template, or if the
    configured format does not fit the template."""
    if model is None or model.pooling is not None:
        return None
    try:
        return await model.in_text_thread(chat_format, model.tokenizer)
    except InvalidRequest:  # chat requests report this error
        return None


def _pooling(model: LoadedModel) -> dict[str, Any]:
    """Return the properties of a pooling model: labels, or vector size and prompts."""
    assert model.pooling is not None
    if model.info.task == "classify":
        return {"labels": list(model.pooling.labels)}
    return {"embedding_size": model.info.embedding_size, "prompts": list(model.pooling.prompts)}


async def _adapter_row(http: HttpState, base: str, adapter: str) -> dict[str, Any]:
    """Return an adapter's entry for the list of models; its `parent` is the base model. Every registered adapter counts
    as loaded, because the place of its weights does not matter to clients."""
    row, model = await _row(http, base), http.registry.slot_of(base).model
    is_known = model is not None and adapter in model.adapters
    state = row["state"] if is_known else ModelState.LOADABLE.value
    return row | {"id": adapter, "root": adapter, "parent": base, "state": state}
