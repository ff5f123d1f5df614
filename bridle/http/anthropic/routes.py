"""`POST /v1/messages`, and the route that counts the tokens of a message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.chat.chat_request import ChatRequest, TurnReader, prepare_chat
from bridle.chat.stream_deltas import Content, StreamDelta
from bridle.chat.system_blocks import kept_blocks
from bridle.http.anthropic.cache_control import breakpoints
from bridle.http.anthropic.errors import AnthropicRoute, anthropic_body
from bridle.http.anthropic.schemas import MessagesBody
from bridle.http.anthropic.shapes import BlockWriter, blocks, message_shape, stop_fields, usage_fields
from bridle.http.event_template import TextTemplate, text_of
from bridle.http.middleware.request_context import call_of, run_while_connected
from bridle.http.sse import SseResponse, SseWriter
from bridle.http.state import http_state, json_response, serving_of
from bridle.http.typed_sse import named_event, send_events, with_last_event
from bridle.serving.lifecycle.generation import Generation, SubRequest
from bridle.serving.lifecycle.live_text import LiveText
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
from bridle.serving.requests.request_builder import EventOptions

#: The response header with the limit of output tokens, if it is less than the request's `max_tokens`.
CAP_HEADER = "x-max-tokens"
#: Sent as an event, because some clients close a stream without events after minutes, and ignore SSE comments.
_PING = named_event({"type": "ping"})

router = APIRouter(route_class=AnthropicRoute)


@router.post("/v1/messages", summary="Answer in a conversation (Anthropic's API)")
async def messages(body: MessagesBody, request: Request) -> Response:
    serving = serving_of(request, body.trace)
    _drop_blocks(body, request, serving)
    answer = await run_while_connected(request.receive, _answer(body, serving))
    if not body.stream:
        return json_response(answer.whole(), headers=answer.headers)
    produce = with_last_event(answer.stream, call_of(request.scope), anthropic_body)
    response = SseResponse(produce, http_state(request).settings, ping=_PING)
    response.headers.update(answer.headers)
    return response


async def _answer(body: MessagesBody, serving: RequestLifecycle) -> _Answer:
    """Generate the answer to a request. The answer is complete unless the request streams."""
    turn, headers = _capped(await _turn(body, serving), serving.model.max_sequence_tokens)
    whole = not body.stream
    cache = body.cache_options(serving.user)
    retains = (*turn.events["retains"], *cache["retains"])
    events: EventOptions = {**turn.events, "cache_key": cache["cache_key"], "retains": retains}
    generation = await serving.prepare([turn.prompt], turn.sampling, turn.steering, run=whole, **events)
    return _Answer(generation, turn, headers)


async def _turn(body: MessagesBody, serving: RequestLifecycle) -> ChatRequest:
    model = await serving.acquire_model(
        body.model, body.adapter, priority=body.priority, deadline=body.deadline, must_name=True
    )
    chat, prefill = body.to_chat(model.name, model.modalities)
    sampling = chat.filled(chat.sampling(max_tokens=body.max_tokens), model)
    cuts = [(cut.to_chat(model.name, model.modalities)[0], seconds) for cut, seconds in breakpoints(body)]
    conversation = replace(
        chat.conversation(prefill), breakpoints=tuple((cut.conversation(), seconds) for cut, seconds in cuts)
    )
    return await prepare_chat(serving, conversation, sampling, chat)


@router.post("/v1/messages/count_tokens", summary="How many tokens a message would have (Anthropic's API)")
async def count_tokens(body: MessagesBody, request: Request) -> Response:
    body.max_tokens = body.max_tokens or 1  # nothing is generated
    serving = serving_of(request)
    _drop_blocks(body, request, serving)
    turn = await run_while_connected(request.receive, _turn(body, serving))
    return json_response({"input_tokens": len(turn.prompt), "context_management": None})


def _drop_blocks(body: MessagesBody, request: Request, serving: RequestLifecycle) -> None:
    """Remove the blocks of `system` that the operator excludes from prompts. The number of removed blocks is logged."""
    body.system, num_dropped = kept_blocks(body.system, http_state(request).settings.drop_system_blocks)
    serving.story.dropped_blocks = num_dropped


def _capped(turn: ChatRequest, limit: int) -> tuple[ChatRequest, dict[str, str]]:
    """Return the chat request with `max_tokens` limited to the free context, and the response header that reports the
    limit. Anthropic's clients must send `max_tokens`, and most send the same number to every model."""
    room, asked = limit - len(turn.prompt), turn.sampling.max_tokens
    if room < 1 or asked is None or asked <= room:
        return turn, {}
    return replace(turn, sampling=turn.sampling.with_(max_tokens=room)), {CAP_HEADER: str(room)}


@dataclass(slots=True)
class _Answer:
    """Writes the output of a generation in Anthropic's format."""

    generation: Generation
    turn: ChatRequest
    headers: dict[str, str]
    _reader: TurnReader = field(init=False)
    _blocks: BlockWriter = field(default_factory=BlockWriter)

    def __post_init__(self) -> None:
        self._reader = self.turn.reader()

    def whole(self) -> dict[str, Any]:
        """Return the response of a request that does not stream."""
        output = self.generation.parts[0].outputs[0]
        found = self.turn.message(output)
        self.turn.keep(self.generation.model, self.generation.parts[0].request, [(output, found)])
        message = self._message(blocks(found))
        return message | stop_fields(output, bool(found.calls)) | self._note_fields()

    async def stream(self, writer: SseWriter) -> None:
        """Send the events of a request that streams."""
        (part,) = self.generation.parts
        # The first event is sent at once, because clients wait for it less long than a long prompt takes. The number of
        # cached prompt tokens is not known yet; the usage at the end has it.
        await send_events(writer, [{"type": "message_start", "message": self._message([])}])

        async def sink(part: SubRequest, batch: object) -> LiveText | None:
            events: list[dict[str, Any]] = []
            for delta in part.reader.read():  # other output of a controller comes at the end
                if delta.index == 0:
                    events += self._blocks.add(self._reader.push(delta.text, delta.is_last))
            await send_events(writer, events)
            return self._live(writer) if part.is_plain else None

        await self.generation.run(sink)
        self.turn.keep(self.generation.model, part.request, [(part.outputs[0], self._reader.found)])
        await send_events(writer, [*self._blocks.close(), *self._ending(part)])

    def _live(self, writer: SseWriter) -> LiveText | None:
        """Return an encoder for output that need not be parsed; None if the output must be parsed."""
        if self._reader.is_plain and self._blocks.is_text:
            return writer.live(TextTemplate(lambda text: self._events([Content(text)]), self._reader.add_content))
        return writer.live(lambda tokens: self._events(self._reader.push(text_of(tokens))))

    def _events(self, pieces: Iterable[StreamDelta]) -> bytes:
        return b"".join(map(named_event, self._blocks.add(pieces)))

    def _ending(self, part: SubRequest) -> list[dict[str, Any]]:
        stop = stop_fields(part.outputs[0], self._reader.has_calls)
        last = {"type": "message_delta", "delta": stop, "usage": self._usage(), "context_management": None}
        return [last | self._note_fields(), {"type": "message_stop"}]

    def _note_fields(self) -> dict[str, Any]:
        """Return the response fields with logs and variables of controllers."""
        return self.generation.parts[0].note_fields(0)

    def _usage(self) -> dict[str, Any]:
        num_thinking = self.turn.num_thinking(self.generation.parts[0].outputs[0].token_ids)
        return usage_fields(self.generation.usage, num_thinking, self.turn.events["retains"])

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        made = message_shape(self.generation.story.id, self.generation.served_name, content, self._usage())
        return made | {"seed": self.generation.parts[0].request.sampling.seed}
