"""`POST /v1/messages`, and the count of tokens that a message would have."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.chat.tools.pieces import Found
from bridle.http.anthropic.errors import AnthropicRoute, anthropic_body
from bridle.http.anthropic.schemas import MessagesBody
from bridle.http.anthropic.shapes import BlockWriter, blocks, stop_fields, usage_fields
from bridle.http.errors import json_response
from bridle.http.generation import Generation, Part, reserve
from bridle.http.models import hold, hold_model
from bridle.http.openai.turn import Turn, TurnReader, plan_turn, prepare_turn
from bridle.http.state import http_state
from bridle.http.terms import take_terms
from bridle.http.transport.call import call_of
from bridle.http.transport.named_events import send_events, with_last_event
from bridle.http.transport.sse import SseResponse, SseWriter, run_while_connected
from bridle.outputs import Usage
from bridle.service import LoadedModel

#: The header that says how many tokens an answer may have, if that is less than was asked for.
CAP_HEADER = "x-max-tokens"

router = APIRouter(route_class=AnthropicRoute)


@router.post("/v1/messages", summary="Answer in a conversation (Anthropic's API)")
async def messages(body: MessagesBody, request: Request) -> Response:
    http, call = http_state(request), call_of(request.scope)
    take_terms(body, request)
    served = await hold(request, body.model, body.adapter)
    chat, prefill = body.to_chat(served.model.name)
    sampling = chat.sampling(max_tokens=body.max_tokens)
    ticket = reserve(http, call, served.model, 1, 1)
    turn = await plan_turn(chat, request, served.model, sampling, prefill)
    turn, said = _capped(turn, served.model)
    generation = await prepare_turn(turn, request, served, ticket)
    answer = _Answer(generation, turn, call.id)
    if body.stream:
        response = SseResponse(with_last_event(answer.stream, call, anthropic_body), http.settings)
        response.headers.update(said)
        return response
    await run_while_connected(request.receive, generation.run())
    return json_response(answer.whole(), headers=said)


@router.post("/v1/messages/count_tokens", summary="How many tokens a message would have (Anthropic's API)")
async def count_tokens(body: MessagesBody, request: Request) -> Response:
    http, call = http_state(request), call_of(request.scope)
    model = await hold_model(request, body.model)
    body.max_tokens = body.max_tokens or 1  # nothing is generated
    chat, prefill = body.to_chat(model.name)
    reserve(http, call, model, 1, 1)
    turn = await plan_turn(chat, request, model, chat.sampling(max_tokens=body.max_tokens), prefill)
    return json_response({"input_tokens": len(turn.prompt)})


def _capped(turn: Turn, model: LoadedModel) -> tuple[Turn, dict[str, str]]:
    """The turn with no more `max_tokens` than the context leaves, and the header that says so. These clients must send
    a number, and most send the same one to every model."""
    room, asked = model.max_sequence_tokens - len(turn.prompt), turn.sampling.max_tokens
    if room < 1 or asked is None or asked <= room:
        return turn, {}
    return replace(turn, sampling=turn.sampling.with_(max_tokens=room)), {CAP_HEADER: str(room)}


@dataclass(slots=True)
class _Answer:
    """Writes the output of a generation in this route's shape."""

    generation: Generation
    turn: Turn
    call_id: str
    _reader: TurnReader = field(init=False)
    _blocks: BlockWriter = field(default_factory=BlockWriter)

    def __post_init__(self) -> None:
        self._reader = self.turn.reader()

    def whole(self) -> dict[str, Any]:
        """The answer of a call that does not stream."""
        output = self.generation.parts[0].outputs[0]
        found = Found().add(self.turn.reader(is_whole=True).push(output.text, is_last=True))
        message = self._message(blocks(found), self.generation.usage)
        return message | stop_fields(output, bool(found.calls)) | self._note_fields()

    async def stream(self, writer: SseWriter) -> None:
        """The events of a call that streams."""
        (part,) = self.generation.parts
        has_begun = False

        async def sink(part: Part) -> None:
            nonlocal has_begun
            events = []
            if not has_begun and part.collector.has_prompt:
                has_begun = True
                events.append({"type": "message_start", "message": self._message([], self.generation.usage)})
            for delta in part.reader.take():  # other output of a controller comes at the end
                if delta.index == 0:
                    events += self._blocks.add(self._reader.push(delta.text, delta.is_last))
            await send_events(writer, events)

        await self.generation.run(sink)
        await send_events(writer, [*self._blocks.close(), *self._ending(part)])

    def _ending(self, part: Part) -> list[dict[str, Any]]:
        stop = stop_fields(part.outputs[0], self._reader.has_calls)
        usage = self._usage(self.generation.usage)
        last = {"type": "message_delta", "delta": stop, "usage": usage} | self._note_fields()
        return [last, {"type": "message_stop"}]

    def _note_fields(self) -> dict[str, Any]:
        """Logs and variables of a controller."""
        return self.generation.parts[0].notes.take(0).fields()

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return usage_fields(usage, self.turn.num_thinking(self.generation.parts[0].outputs[0].token_ids))

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": f"msg_{self.call_id}",
            "type": "message",
            "role": "assistant",
            "model": self.generation.served_name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(usage),
            "seed": self.generation.parts[0].request.sampling.seed,
        }
