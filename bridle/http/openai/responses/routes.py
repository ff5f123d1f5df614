"""`POST /v1/responses` and `POST /v1/responses/compact`. Unless `store` is false, what was said and answered is kept,
for requests that refer to it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.middleware.request_context import call_of, run_while_connected
from bridle.http.openai.responses.compact import compacted
from bridle.http.openai.responses.items import Event
from bridle.http.openai.responses.response_writer import ResponseWriter, begin
from bridle.http.openai.responses.schemas import CompactBody, ResponsesBody
from bridle.http.sse import SseResponse, SseWriter
from bridle.http.state import http_state, json_response, serving_of
from bridle.http.typed_sse import send_events, with_last_event
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
from bridle.serving.outputs.response_store import ResponseStore

router = APIRouter(route_class=BoundedRoute)


@router.post("/v1/responses", summary="Answer in a conversation of items")
async def responses(body: ResponsesBody, request: Request) -> Response:
    book = http_state(request).responses
    answer = await run_while_connected(request.receive, _answer(body, serving_of(request, body.trace), book))
    if not body.stream:
        return json_response(answer.whole())

    async def stream(writer: SseWriter) -> None:
        async def send(events: list[Event]) -> None:
            await send_events(writer, events)

        await answer.stream(send)
        writer.end()

    produce = with_last_event(stream, call_of(request.scope), answer.failure)
    return SseResponse(produce, http_state(request).settings)


@router.post("/v1/responses/compact", summary="A conversation of items, made shorter")
async def compact(body: CompactBody, request: Request) -> Response:
    work = compacted(body, serving_of(request, body.trace), http_state(request).responses)
    return json_response(await run_while_connected(request.receive, work))


async def _answer(body: ResponsesBody, serving: RequestLifecycle, book: ResponseStore) -> ResponseWriter:
    """What a call is answered with; all of it unless it streams."""
    body = body.model_copy(update={"input": body.items(book, serving.identity.user)})
    generation, turn = await begin(body, serving)
    return ResponseWriter(generation, turn, body, serving.story.id, book)
