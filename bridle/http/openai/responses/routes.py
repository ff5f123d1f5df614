"""`POST /v1/responses`. Unless `store` is false, what was said and answered is kept, for requests that refer to it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.chat.turn import Turn, TurnReader
from bridle.errors import BridleError
from bridle.http.errors import error_body, json_response
from bridle.http.openai.chat import turn_of
from bridle.http.openai.responses.items import Event, ItemWriter
from bridle.http.openai.responses.schemas import ResponsesBody
from bridle.http.openai.shapes import usage_shape
from bridle.http.state import http_state, serving_of
from bridle.http.transport.call import call_of, run_while_connected
from bridle.http.transport.json_body import BoundedRoute
from bridle.http.transport.named_events import send_events, with_last_event
from bridle.http.transport.sse import SseResponse, SseWriter
from bridle.outputs import FinishReason
from bridle.service.generation import Generation, Part
from bridle.service.response_book import ResponseBook
from bridle.service.serving import Serving

router = APIRouter(route_class=BoundedRoute)


@router.post("/v1/responses", summary="Answer in a conversation of items")
async def responses(body: ResponsesBody, request: Request) -> Response:
    book = http_state(request).responses
    answer = await run_while_connected(request.receive, _answer(body, serving_of(request, body.trace), book))
    if not body.stream:
        return json_response(answer.whole())
    produce = with_last_event(answer.stream, call_of(request.scope), answer.failure)
    return SseResponse(produce, http_state(request).settings)


async def _answer(body: ResponsesBody, serving: Serving, book: ResponseBook) -> _Answer:
    """What a call is answered with; all of it unless it streams."""
    said = body.items(book, serving.identity.user)
    body = body.model_copy(update={"input": said})
    model = await serving.hold(body.model, body.adapter, priority=body.priority, deadline=body.deadline)
    chat = body.to_chat(model.name, model.modalities)
    limit = body.max_tokens if body.max_output_tokens is None else body.max_output_tokens
    turn = await turn_of(chat, serving, chat.sampling(max_tokens=limit))
    sampling = chat.filled(turn.sampling, model, len(turn.prompt))
    generation = await serving.prepare([turn.prompt], sampling, turn.steering, **turn.wanted)
    if not body.stream:
        await generation.run()
    return _Answer(generation, turn, body, serving.story.id, book)


@dataclass(slots=True)
class _Answer:
    """Writes the output of a generation in this route's shape."""

    generation: Generation
    turn: Turn
    body: ResponsesBody
    call_id: str
    book: ResponseBook
    created: int = field(default_factory=lambda: int(time.time()))
    _reader: TurnReader = field(init=False)
    _items: ItemWriter = field(init=False)
    _numbers: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self._reader = self.turn.reader()
        self._items = ItemWriter(self.call_id)

    def whole(self) -> dict[str, Any]:
        """The answer of a call that does not stream."""
        output = self.generation.parts[0].outputs[0]
        self._reader = self.turn.reader(is_whole=True)
        self._items.add(self._reader.push(output.text, is_last=True))
        self._items.close(self._status)
        self._keep()
        return self._stored(self._response(self._status) | self._note_fields())

    async def stream(self, writer: SseWriter) -> None:
        """The events of a call that streams."""
        begun = self._response("in_progress")
        await self._send(
            writer, [{"type": f"response.{what}", "response": begun} for what in ("created", "in_progress")]
        )

        async def sink(part: Part, events: object) -> None:
            for delta in part.reader.read():  # what a controller says beside is told in the end
                if delta.index == 0:
                    await self._send(writer, self._items.add(self._reader.push(delta.text, delta.is_last)))

        await self.generation.run(sink)
        self._keep()
        events = self._items.close(self._status)
        response = self._stored(self._response(self._status) | self._note_fields())
        await self._send(writer, [*events, {"type": f"response.{self._status}", "response": response}])

    def failure(self, error: BridleError) -> Event:
        """The event of a response that failed."""
        inner = error_body(error)["error"]
        told = {"code": inner["code"], "message": inner["message"]}
        response = self._response("failed") | {"error": told}
        return {"type": "response.failed", "sequence_number": next(self._numbers), "response": response}

    def _keep(self) -> None:
        """Remember the answer for the next call of the conversation."""
        (part,) = self.generation.parts
        self.turn.keep(self.generation.model, part.request, [(part.outputs[0], self._reader.found)])

    @property
    def _is_stored(self) -> bool:
        return self.body.store is not False

    def _stored(self, response: dict[str, Any]) -> dict[str, Any]:
        """The response; it is kept if its client wants that, and if there is room."""
        if self._is_stored:
            user = self.generation.parts[0].request.tenant
            response["store"] = self.book.keep(user, response, self.body.input)
        return response

    def _note_fields(self) -> dict[str, Any]:
        """Logs and variables of a controller."""
        return self.generation.parts[0].note_fields(0)

    async def _send(self, writer: SseWriter, events: Iterable[Event]) -> None:
        await send_events(writer, [event | {"sequence_number": next(self._numbers)} for event in events])

    @property
    def _status(self) -> str:
        output = self.generation.parts[0].outputs[0]
        return "incomplete" if output.finish_reason is FinishReason.LENGTH else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        body = self.body
        return {
            "id": f"resp_{self.call_id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.generation.served_name,
            "output": [] if status == "in_progress" else self._items.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": self._is_stored,
            "temperature": body.temperature,
            "text": {"format": (body.text.format if body.text is not None else None) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage(),
            "seed": self.generation.parts[0].request.sampling.seed,
        }

    def _usage(self) -> dict[str, Any]:
        tokens = self.generation.parts[0].outputs[0].token_ids
        shape = usage_shape(self.generation.usage, self.turn.num_thinking(tokens))
        return {
            "input_tokens": shape["prompt_tokens"],
            "input_tokens_details": shape["prompt_tokens_details"],
            "output_tokens": shape["completion_tokens"],
            "output_tokens_details": shape["completion_tokens_details"],
            "total_tokens": shape["total_tokens"],
        }
