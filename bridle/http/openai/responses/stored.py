"""Routes that read and delete stored responses, and list their items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.http.middleware.identity import identity_of
from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.openai.responses.input_items import as_item
from bridle.http.state import http_state, json_response
from bridle.safe_repr import short_repr

#: The maximum number of items in one page of a list.
MAX_PAGE = 100

router = APIRouter(route_class=BoundedRoute)


@router.get("/v1/responses/{response_id}", summary="A stored response")
async def read(response_id: str, request: Request) -> Response:
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise UnsupportedFeature("stream is true, but a stored response is not streamed; leave stream out", "stream")
    return json_response(http_state(request).responses.response(identity_of(request).user, response_id))


@router.delete("/v1/responses/{response_id}", summary="Forget a stored response")
async def delete(response_id: str, request: Request) -> Response:
    http_state(request).responses.delete(identity_of(request).user, response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items", summary="The input items of a stored response")
async def input_items(response_id: str, request: Request) -> Response:
    stored = http_state(request).responses.input_items(identity_of(request).user, response_id)
    items = [listed(item, response_id, number) for number, item in enumerate(stored)]
    return json_response(page_of(items, request.query_params))


def page_of(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of items, the latest first unless `order` is `asc`. The query's `limit` is at most `MAX_PAGE`;
    `after` is the id of the last item before the page."""
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {short_repr(order)}; must be 'asc' or 'desc'", "order")
    if order == "desc":
        items = items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidRequest(f"after is {short_repr(after)}, which is not an item of this list", "after")
        items = items[ids.index(after) + 1 :]
    page = items[: _limit(query.get("limit"))]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    has_more = len(page) < len(items)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": has_more}


def _limit(text: str | None) -> int:
    if text is None:
        return 20
    if not (text.isdecimal() and text.isascii() and len(text) < 5 and 1 <= int(text) <= MAX_PAGE):
        raise InvalidRequest(f"limit is {short_repr(text)}; must be between 1 and {MAX_PAGE}", "limit")
    return int(text)


def listed(item: dict[str, Any], response_id: str, number: int) -> dict[str, Any]:
    """Return an item with all fields that clients require, and an id."""
    return {"id": f"item_{response_id.removeprefix('resp_')}_{number}"} | as_item(item)
