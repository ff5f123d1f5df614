"""`/v1/conversations`: conversations that the server stores for a client. Requests for responses continue a
conversation and add items to it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.http.fields import InnerFields
from bridle.http.middleware.identity import identity_of
from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.openai.responses.input_items import as_item, check_items
from bridle.http.openai.responses.schemas import Metadata
from bridle.http.openai.responses.stored import page_of
from bridle.http.openai.schemas import MAX_MESSAGES, JsonObjects, objects
from bridle.http.state import http_state, json_response
from bridle.serving.outputs.conversation_store import Conversation, ConversationStore

router = APIRouter(route_class=BoundedRoute)
_Items = Annotated[JsonObjects | None, objects("items", MAX_MESSAGES)]


class ConversationBody(InnerFields):
    """Body of `POST /v1/conversations`: the first items of the conversation."""

    items: _Items = None
    metadata: Metadata = None


class UpdateBody(InnerFields):
    """Body of `POST /v1/conversations/{conversation_id}`: the new metadata, which replace the earlier metadata."""

    metadata: Metadata = None


class ItemsBody(InnerFields):
    """Body of `POST /v1/conversations/{conversation_id}/items`: the items to add."""

    items: Annotated[JsonObjects, objects("items", MAX_MESSAGES)]


@router.post("/v1/conversations", summary="Begin a conversation that the server keeps")
async def create(body: ConversationBody, request: Request) -> Response:
    store, user = _store(request)
    items = body.items or []
    check_items([], items)
    return json_response(store.create(user, body.metadata or {}, map(as_item, items)).fields())


@router.get("/v1/conversations/{conversation_id}", summary="A conversation")
async def read(conversation_id: str, request: Request) -> Response:
    return json_response(_find(conversation_id, request).fields())


@router.post("/v1/conversations/{conversation_id}", summary="Change the metadata of a conversation")
async def update(conversation_id: str, body: UpdateBody, request: Request) -> Response:
    found = _find(conversation_id, request)
    return json_response(_store(request)[0].update(found, body.metadata or {}).fields())


@router.delete("/v1/conversations/{conversation_id}", summary="Forget a conversation and its items")
async def delete(conversation_id: str, request: Request) -> Response:
    store, user = _store(request)
    store.delete(user, conversation_id)
    return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.post("/v1/conversations/{conversation_id}/items", summary="Add items to a conversation")
async def add_items(conversation_id: str, body: ItemsBody, request: Request) -> Response:
    found = _find(conversation_id, request)
    check_items(found.listed(), body.items)
    added = _store(request)[0].add(found, map(as_item, body.items))
    ids = [item["id"] for item in added] or [None]
    return json_response({"object": "list", "data": added, "first_id": ids[0], "last_id": ids[-1], "has_more": False})


@router.get("/v1/conversations/{conversation_id}/items", summary="The items of a conversation")
async def list_items(conversation_id: str, request: Request) -> Response:
    return json_response(page_of(_find(conversation_id, request).listed(), request.query_params))


@router.get("/v1/conversations/{conversation_id}/items/{item_id}", summary="An item of a conversation")
async def read_item(conversation_id: str, item_id: str, request: Request) -> Response:
    return json_response(_find(conversation_id, request).item(item_id))


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}", summary="Remove an item from a conversation")
async def delete_item(conversation_id: str, item_id: str, request: Request) -> Response:
    found = _find(conversation_id, request)
    return json_response(_store(request)[0].remove(found, item_id).fields())


def _store(request: Request) -> tuple[ConversationStore, str]:
    """Return the server's store of conversations, and the user of a request."""
    return http_state(request).conversations, identity_of(request).user


def _find(conversation_id: str, request: Request) -> Conversation:
    store, user = _store(request)
    return store.find(user, conversation_id)
