"""`POST /v1/messages`, and the count of tokens that a message would have."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.chat.turn import Turn, TurnReader
from bridle.http.anthropic.errors import AnthropicRoute, anthropic_body
from bridle.http.anthropic.schemas import MessagesBody
from bridle.http.anthropic.shapes import BlockWriter, blocks, stop_fields, usage_fields
from bridle.http.errors import json_response
from bridle.http.openai.chat import turn_of
from bridle.http.state import http_state, serving_of
from bridle.http.transport.call import call_of, run_while_connected
from bridle.http.transport.named_events import send_events, with_last_event
from bridle.http.transport.sse import SseResponse, SseWriter
from bridle.outputs import Usage
from bridle.service.generation import Generation, Part
from bridle.service.serving import Serving

#: The header that says how many tokens an answer may have, if that is less than was asked for.
CAP_HEADER = "x-max-tokens"

router = APIRouter(route_class=AnthropicRoute)


@router.post("/v1/messages", summary="Answer in a conversation (Anthropic's API)")
async def messages(body: MessagesBody, request: Request) -> Response:
    answer = await run_while_connected(request.receive, _answer(body, serving_of(request, body.trace)))
    if not body.stream:
        return json_response(answer.whole(), headers=answer.headers)
    produce = with_last_event(answer.stream, call_of(request.scope), anthropic_body)
    response = SseResponse(produce, http_state(request).settings)
    response.headers.update(answer.headers)
    return response


async def _answer(body: MessagesBody, serving: Serving) -> _Answer:
    """What a call is answered with; all of it unless it streams."""
    turn, headers = _capped(await _turn(body, serving), serving.model.max_sequence_tokens)
    generation = await serving.prepare([turn.prompt], turn.sampling, turn.steering, **turn.wanted)
    if not body.stream:
        await generation.run()
    return _Answer(generation, turn, headers)


async def _turn(body: MessagesBody, serving: Serving) -> Turn:
    model = await serving.hold(body.model, body.adapter, priority=body.priority, deadline=body.deadline, must_name=True)
    chat, prefill = body.to_chat(model.name, model.modalities)
    return await turn_of(chat, serving, chat.filled(chat.sampling(max_tokens=body.max_tokens), model), prefill)


@router.post("/v1/messages/count_tokens", summary="How many tokens a message would have (Anthropic's API)")
async def count_tokens(body: MessagesBody, request: Request) -> Response:
    body.max_tokens = body.max_tokens or 1  # nothing is generated
    turn = await run_while_connected(request.receive, _turn(body, serving_of(request)))
    return json_response({"input_tokens": len(turn.prompt)})


def _capped(turn: Turn, limit: int) -> tuple[Turn, dict[str, str]]:
    """The turn with no more `max_tokens` than the context leaves, and the header that says so. These clients must say a
    number, and most send the same one to every model."""
    room, asked = limit - len(turn.prompt), turn.sampling.max_tokens
    if room < 1 or asked is None or asked <= room:
        return turn, {}
    return replace(turn, sampling=turn.sampling.with_(max_tokens=room)), {CAP_HEADER: str(room)}


@dataclass(slots=True)
class _Answer:
    """Writes the output of a generation in this route's shape."""

    generation: Generation
    turn: Turn
    headers: dict[str, str]
    _reader: TurnReader = field(init=False)
    _blocks: BlockWriter = field(default_factory=BlockWriter)

    def __post_init__(self) -> None:
        self._reader = self.turn.reader()

    def whole(self) -> dict[str, Any]:
        """The answer of a call that does not stream."""
        output = self.generation.parts[0].outputs[0]
        found = self.turn.message(output.text)
        self.turn.keep(self.generation.model, self.generation.parts[0].request, [(output, found)])
        message = self._message(blocks(found), self.generation.usage)
        return message | stop_fields(output, bool(found.calls)) | self._note_fields()

    async def stream(self, writer: SseWriter) -> None:
        """The events of a call that streams."""
        (part,) = self.generation.parts
        has_begun = False

        async def sink(part: Part, batch: object) -> None:
            nonlocal has_begun
            events: list[dict[str, Any]] = []
            if not has_begun and part.collector.has_prompt:
                has_begun = True
                events.append({"type": "message_start", "message": self._message([], self.generation.usage)})
            for delta in part.reader.read():  # other output of a controller comes at the end
                if delta.index == 0:
                    events += self._blocks.add(self._reader.push(delta.text, delta.is_last))
            await send_events(writer, events)

        await self.generation.run(sink)
        self.turn.keep(self.generation.model, part.request, [(part.outputs[0], self._reader.found)])
        await send_events(writer, [*self._blocks.close(), *self._ending(part)])

    def _ending(self, part: Part) -> list[dict[str, Any]]:
        stop = stop_fields(part.outputs[0], self._reader.has_calls)
        usage = self._usage(self.generation.usage)
        last = {"type": "message_delta", "delta": stop, "usage": usage} | self._note_fields()
        return [last, {"type": "message_stop"}]

    def _note_fields(self) -> dict[str, Any]:
        """Logs and variables of a controller."""
        return self.generation.parts[0].note_fields(0)

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return usage_fields(usage, self.turn.num_thinking(self.generation.parts[0].outputs[0].token_ids))

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": f"msg_{self.generation.story.id}",
            "type": "message",
            "role": "assistant",
            "model": self.generation.served_name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(usage),
            "seed": self.generation.parts[0].request.sampling.seed,
        }
