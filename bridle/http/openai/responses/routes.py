"""`POST /v1/responses` and `POST /v1/responses/compact`. Unless `store` is false, the response is stored for later
requests."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.errors import InvalidRequest
from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.middleware.request_context import call_of, run_while_connected
from bridle.http.openai.responses.items import Event
from bridle.http.openai.responses.response_writer import ResponseWriter, begin, usage_of
from bridle.http.openai.responses.schemas import CompactBody, ResponsesBody
from bridle.http.openai.responses.stored import listed
from bridle.http.openai.responses.summaries import packed
from bridle.http.openai.schemas import JsonObjects
from bridle.http.sse import SseResponse, SseWriter
from bridle.http.state import HttpState, http_state, json_response, serving_of
from bridle.http.typed_sse import send_events, with_last_event
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle

#: The default limit of a summary in tokens; `KEPT_BYTES` limits the user's messages that are kept, as JSON.
SUMMARY_TOKENS = 1_024
KEPT_BYTES = 64 << 10
_ASK = (
    "Summarize our conversation so far for somebody who goes on with it and has not read it: what was asked for, what "
    "was decided and done, the facts and names that matter, and what is left to do. Write the summary alone."
)

router = APIRouter(route_class=BoundedRoute)


@router.post("/v1/responses", summary="Answer in a conversation of items")
async def responses(body: ResponsesBody, request: Request) -> Response:
    answer = await run_while_connected(
        request.receive, _answer(body, serving_of(request, body.trace), http_state(request))
    )
    if not body.stream:
        return json_response(answer.whole())

    async def stream(writer: SseWriter) -> None:
        async def send(events: list[Event]) -> None:
            await send_events(writer, events)

        await answer.stream(send, writer)
        writer.end()

    produce = with_last_event(stream, call_of(request.scope), answer.failure)
    return SseResponse(produce, http_state(request).settings)


@router.post("/v1/responses/compact", summary="Shorten a conversation of items")
async def compact(body: CompactBody, request: Request) -> Response:
    work = _compacted(body, serving_of(request, body.trace), http_state(request))
    return json_response(await run_while_connected(request.receive, work))


async def _answer(body: ResponsesBody, serving: RequestLifecycle, http: HttpState) -> ResponseWriter:
    """Generate the response to a request. The response is complete unless the request streams."""
    user, thread = serving.identity.user, body.turn(http.conversations, serving.identity.user)
    body = body.model_copy(update={"input": body.items(http.responses, http.conversations, user)})
    generation, turn = await begin(body, serving)
    return ResponseWriter(generation, turn, body, serving.story.id, http.responses, thread=thread)


async def _compacted(body: CompactBody, serving: RequestLifecycle, http: HttpState) -> dict[str, Any]:
    """Shorten a conversation: keep the user's last messages, and let the model summarize the whole conversation. Raises
    `InvalidRequest`."""
    said = body.items(http.responses, http.conversations, serving.identity.user)
    if not said:
        raise InvalidRequest("input is empty; must have at least one item to compact", "input")
    asked = [*said, {"role": "user", "content": _ASK}]
    changes = {"input": asked, "tools": None, "tool_choice": None, "text": None, "stream": None}
    generation, turn = await begin(body.model_copy(update=changes), serving, SUMMARY_TOKENS)
    summary = turn.message(generation.parts[0].outputs[0]).content
    name = serving.story.id
    item = {"type": "compaction", "id": f"cmp_{name}", "encrypted_content": packed(summary)}
    return {
        "id": f"resp_{name}",
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*_kept(said, name), item],
        "usage": usage_of(generation, turn),
    }


def _kept(said: JsonObjects, name: str) -> JsonObjects:
    """Return the user's last messages whose JSON fits into `KEPT_BYTES`."""
    kept: JsonObjects = []
    room = KEPT_BYTES
    for number, item in reversed(list(enumerate(said))):
        if item.get("type", "message") != "message" or item.get("role") != "user":
            continue
        room -= len(msgspec.json.encode(item))
        if room < 0:
            break
        kept.append(listed(item, f"resp_{name}", number))
    return kept[::-1]
