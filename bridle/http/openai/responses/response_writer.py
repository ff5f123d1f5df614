"""Builds responses of the Responses API from a generation: complete, or as events."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import structlog

from bridle.chat.chat_request import ChatRequest, TurnReader, prepare_chat
from bridle.errors import BridleError
from bridle.http.errors import error_body
from bridle.http.event_template import text_of
from bridle.http.openai.responses.items import Event, ItemWriter
from bridle.http.openai.responses.schemas import ResponsesBody
from bridle.http.openai.responses_common import usage_shape
from bridle.http.sse import SseWriter
from bridle.http.typed_sse import named_event
from bridle.outputs import FinishReason
from bridle.serving.lifecycle.generation import Generation, SubRequest
from bridle.serving.lifecycle.live_text import LiveText
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
from bridle.serving.outputs.conversation_store import ConversationTurn
from bridle.serving.outputs.response_store import ResponseStore
from bridle.serving.requests.request_builder import EventOptions

_log: structlog.stdlib.BoundLogger = structlog.get_logger("bridle.http")
#: The request fields that a response repeats unchanged; `_asked` has the fields with defaults.
_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id"),
    *("safety_identifier", "prompt_cache_key"),
)
_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed")
#: The default fields of a `json_schema` format in a response.
_FORM = {"name": "answer", "description": None, "schema": None, "strict": False}
#: Sends a list of events to the client in one write.
SendEvents = Callable[[list[Event]], Awaitable[None]]


async def begin(
    body: ResponsesBody, serving: RequestLifecycle, most_tokens: int | None = None
) -> tuple[Generation, ChatRequest]:
    """Validate a body and begin its generation. The generation has ended when this function returns, unless the body
    streams. `input` must have all items of the conversation. The output has at most `most_tokens` tokens; by default
    the rest of the context."""
    if body.offered.skipped:
        _log.info("tools left out", id=serving.story.id, types=body.offered.skipped)
    model = await serving.acquire_model(
        body.model, body.adapter, priority=body.priority, deadline=body.deadline, must_name=True
    )
    chat = body.to_chat(model.name, model.modalities, model.tokenizer.chat_template.text)
    limit = body.max_tokens if body.max_output_tokens is None else body.max_output_tokens
    turn = await prepare_chat(serving, chat.conversation(), chat.sampling(max_tokens=limit), chat)
    sampling = chat.filled(turn.sampling, model)
    if most_tokens is not None and limit is None:
        room = model.max_sequence_tokens - len(turn.prompt)
        sampling = sampling.with_(max_tokens=max(min(most_tokens, room), 1))
    whole = not body.stream
    events: EventOptions = {**turn.events, **body.cache_options(serving.user)}
    return await serving.prepare([turn.prompt], sampling, turn.steering, run=whole, **events), turn


def usage_of(generation: Generation, turn: ChatRequest) -> dict[str, Any]:
    """Return token counts under the field names of the Responses API."""
    shape = usage_shape(generation.usage, turn.num_thinking(generation.parts[0].outputs[0].token_ids))
    return {
        "input_tokens": shape["prompt_tokens"],
        "input_tokens_details": shape["prompt_tokens_details"],
        "output_tokens": shape["completion_tokens"],
        "output_tokens_details": shape["completion_tokens_details"],
        "total_tokens": shape["total_tokens"],
        **generation.usage.constraint_fields(),
    }


@dataclass(slots=True)
class ResponseWriter:
    """Writes the output of a generation in the format of the Responses API. A response with `store` is stored in
    `book`; any other response is stored in `passing`, if given. If `is_warm_up`, only the prompt is computed, which
    makes a request that continues this response faster. `thread` adds the response to its conversation."""

    generation: Generation
    turn: ChatRequest
    body: ResponsesBody
    call_id: str
    book: ResponseStore
    passing: ResponseStore | None = None
    is_warm_up: bool = False
    thread: ConversationTurn | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    _reader: TurnReader = field(init=False)
    _items: ItemWriter = field(init=False)
    _numbers: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self._reader = self.turn.reader()
        self._items = ItemWriter(self.call_id, self.body.offered.names)

    def whole(self) -> dict[str, Any]:
        """Return the response of a request that does not stream."""
        output = self.generation.parts[0].outputs[0]
        self._reader = self.turn.reader(is_whole=True, is_cut=self._status == "incomplete")
        self._items.add(self._reader.push(output.text, is_last=True))
        self._items.close(self._status)
        self._keep()
        return self._stored(self._response(self._status) | self._note_fields())

    async def stream(self, send: SendEvents, writer: SseWriter | None = None) -> None:
        """Send the events of a response while it is generated. Events with only more text may be written directly to
        `writer`."""
        begun = self._response("in_progress")
        await send(self._numbered({"type": f"response.{it}", "response": begun} for it in ("created", "in_progress")))

        async def sink(part: SubRequest, events: object) -> LiveText | None:
            for delta in part.reader.read():  # a controller's logs and variables are sent at the end
                if delta.index == 0 and not self.is_warm_up:
                    await send(self._grown(delta.text, delta.is_last))
            if writer is None or not part.is_plain:
                return None
            return writer.live(lambda tokens: b"".join(map(named_event, self._grown(text_of(tokens)))))

        await self.generation.run(sink)
        events: list[Event] = []
        if not self.is_warm_up:
            self._keep()
            events = self._items.close(self._status)
        response = self._stored(self._response(self._status) | self._note_fields())
        await send(self._numbered([*events, {"type": f"response.{self._status}", "response": response}]))

    def failure(self, error: BridleError) -> Event:
        """Return the event of a response that failed."""
        inner = error_body(error)["error"]
        told = {"code": inner["code"], "message": inner["message"]}
        response = self._response("failed") | {"error": told}
        return {"type": "response.failed", "sequence_number": next(self._numbers), "response": response}

    def _keep(self) -> None:
        """Store the tokens of the answer for the next request of the conversation."""
        (part,) = self.generation.parts
        self.turn.keep(self.generation.model, part.request, [(part.outputs[0], self._reader.found)])

    @property
    def id(self) -> str:
        return f"resp_{self.call_id}"

    @property
    def is_stored(self) -> bool:
        return self.body.store is not False

    def _stored(self, response: dict[str, Any]) -> dict[str, Any]:
        """Add the response to its conversation, store it if the request asks for that, and return it."""
        if self.thread is not None and not self.is_warm_up:
            self.thread.end(response["output"])
        user = self.generation.parts[0].request.tenant
        if self.is_stored:
            response["store"] = self.book.keep(user, response, self.body.input)
        elif self.passing is not None:
            self.passing.keep(user, response, self.body.input)
        return response

    def _note_fields(self) -> dict[str, Any]:
        """Return the response fields with logs and variables of controllers."""
        return self.generation.parts[0].note_fields(0)

    def _grown(self, text: str, is_last: bool = False) -> list[Event]:
        """Return the events for more text."""
        return self._numbered(self._items.add(self._reader.push(text, is_last)))

    def _numbered(self, events: Iterable[Event]) -> list[Event]:
        return [event | {"sequence_number": next(self._numbers)} for event in events]

    @property
    def _status(self) -> str:
        output = self.generation.parts[0].outputs[0]
        is_cut = output.finish_reason is FinishReason.LENGTH and not self.is_warm_up
        return "incomplete" if is_cut else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        body, is_open = self.body, status == "in_progress"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.generation.served_name,
            "output": [] if is_open else self._items.items,
            "usage": None if is_open else usage_of(self.generation, self.turn),
            "store": self.is_stored,
            "background": False,
            "service_tier": "default",
            "truncation": "disabled",
            "metadata": body.metadata or {},
            **({} if self.thread is None else {"conversation": {"id": self.thread.id}}),
            **{name: getattr(body, name) for name in _ECHOED},
            **self._asked(),
        }

    def _asked(self) -> dict[str, Any]:
        """Return the request fields that a response repeats, with defaults for missing fields."""
        body, sampling = self.body, self.generation.parts[0].request.sampling
        form = (body.text.format if body.text is not None else None) or {"type": "text"}
        return {
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "text": {"format": _FORM | form if form.get("type") == "json_schema" else form},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.offered.told,
            "top_logprobs": 0,
            **{name: getattr(sampling, name) for name in _SAMPLING},
        }
