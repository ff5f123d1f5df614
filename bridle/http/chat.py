"""`POST /v1/chat/completions`: a conversation in, the assistant's turn out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.errors import InvalidRequest
from bridle.http.call import call_of
from bridle.http.chat_prompt import chat_prompt, wants_tools
from bridle.http.control import Steering, steering_of
from bridle.http.errors import json_response
from bridle.http.generation import Generation, Part, prepare, reserve
from bridle.http.identity import identity_of
from bridle.http.json_body import BoundedRoute
from bridle.http.logprob_shapes import chat_logprobs
from bridle.http.models import hold_model
from bridle.http.notes import Note
from bridle.http.openai_shapes import SYSTEM_FINGERPRINT, ChoiceNumbers, finish_reason, rewind_fields, usage_shape
from bridle.http.schemas import ChatBody
from bridle.http.sse import SseResponse, SseWriter, run_while_connected
from bridle.http.state import http_state
from bridle.http.tool_calls import ToolCall, ToolCallReader
from bridle.outputs import CompletionOutput
from bridle.sampling import SamplingParams
from bridle.service import Delta, RewindPolicy

router = APIRouter(route_class=BoundedRoute)


@router.post("/v1/chat/completions", summary="Answer in a conversation")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    http, call = http_state(request), call_of(request.scope)
    model = await hold_model(request, body.model)
    sampling = _sampling(body)
    steering = steering_of(body, request, model)
    _check_steering(body, steering)
    ticket = reserve(http, call, model, 1, sampling.n)
    prompt = await chat_prompt(body, model)
    tenant = identity_of(request).user
    generation = await prepare(
        http, call, model, ticket, [prompt], sampling, tenant, steering, tell_resuming=body.wants_resuming
    )
    answer = _Answer(generation, call.id, body.top_logprobs or 0, wants_tools(body), body.wants_stream_usage)
    if body.stream:
        return SseResponse(answer.stream, http.settings)
    await run_while_connected(request.receive, generation.run())
    return json_response(answer.whole())


def _sampling(body: ChatBody) -> SamplingParams:
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidRequest(
            f"max_tokens is {body.max_tokens} and max_completion_tokens is {body.max_completion_tokens}; "
            "send one of them",
            "max_completion_tokens",
        )
    return body.sampling(max_tokens=limits.pop() if limits else None, logprobs=body.num_logprobs())


def _check_steering(body: ChatBody, steering: Steering) -> None:
    """Tool calls are told when they are complete; they cannot be taken back. A constraint would not let any pass."""
    if steering.constraint is not None and wants_tools(body):
        raise InvalidRequest("tools do not go with a constraint; set tool_choice to 'none'", "tools")
    if body.stream and steering.rewind is not RewindPolicy.HOLD and wants_tools(body):
        raise InvalidRequest(f"rewind is {steering.rewind.value!r}; with tools it must be 'hold'", "rewind")


@dataclass(slots=True)
class _Answer:
    """Writes the outputs of a generation in this route's shape."""

    generation: Generation
    call_id: str
    num_top: int
    has_tools: bool
    wants_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))
    _readers: dict[int, ToolCallReader] = field(default_factory=dict)
    _numbers: ChoiceNumbers = field(init=False)

    def __post_init__(self) -> None:
        parts = self.generation.parts
        self._numbers = ChoiceNumbers(len(parts), 1 if parts[0].is_steered else parts[0].request.sampling.n)

    def whole(self) -> dict[str, Any]:
        """The answer of a call that does not stream."""
        choices = [self._choice(part, output) for part in self.generation.parts for output in part.outputs]
        choices.sort(key=lambda choice: int(choice["index"]))
        return self._envelope("chat.completion", choices) | {"usage": usage_shape(self.generation.usage)}

    async def stream(self, writer: SseWriter) -> None:
        """The chunks of a call that streams."""

        async def sink(part: Part) -> None:
            await writer.send(*(chunk for delta, note in part.take() for chunk in self._chunks(part, delta, note)))

        await self.generation.run(sink)
        if self.wants_usage:
            usage = usage_shape(self.generation.usage)
            await writer.send(self._envelope("chat.completion.chunk", []) | {"usage": usage})
        await writer.done()

    def _choice(self, part: Part, output: CompletionOutput) -> dict[str, Any]:
        content, calls = ToolCallReader().push(output.text, is_last=True) if self.has_tools else (output.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [call.shape() for call in calls]
        return {
            "index": self._numbers.of(part.number, output.index),
            "message": message,
            "logprobs": self._logprobs(tuple(output.token_ids), output.logprobs),
            "finish_reason": _finish(output, bool(calls)),
            "stop_reason": output.stop_reason,
            **self._note_fields(part, part.notes.take(output.index)),
            "seed": part.request.sampling.seed,
        }

    def _chunks(self, part: Part, delta: Delta, note: Note) -> list[dict[str, Any]]:
        """The first chunk of a choice carries its role, the last one how it ended."""
        chunks = []
        content, calls = delta.text, list[ToolCall]()
        index = self._numbers.of(part.number, delta.index)
        reader = self._readers.setdefault(index, ToolCallReader())
        num_before = reader.num_calls
        if self.has_tools:
            content, calls = reader.push(delta.text, delta.is_last)
        if delta.is_first:
            chunks.append(self._chunk(index, {"role": "assistant", "content": ""}))
        extra = rewind_fields(delta, part.policy) | self._note_fields(part, note)
        if content or extra or (delta.logprobs and not calls):
            entries = list(delta.logprobs) if part.request.sampling.logprobs is not None else None
            logprobs = self._logprobs(delta.tokens, entries)
            chunks.append(self._chunk(index, {"content": content}, logprobs, extra))
        for position, call in enumerate(calls, num_before):
            chunks.append(self._chunk(index, {"tool_calls": [{"index": position} | call.shape()]}))
        if delta.is_last:
            chunks.append(self._last_chunk(part, delta.index, reader.num_calls > 0))
        return chunks

    def _last_chunk(self, part: Part, index: int, has_calls: bool) -> dict[str, Any]:
        output = part.collector.growing[index].output
        chunk = self._chunk(self._numbers.of(part.number, index), {})
        chunk["choices"][0] |= {
            "finish_reason": _finish(output, has_calls),
            "stop_reason": output.stop_reason,
            "seed": part.request.sampling.seed,
        }
        return chunk

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None} | (extra or {})
        chunk = self._envelope("chat.completion.chunk", [choice])
        return chunk | {"usage": None} if self.wants_usage else chunk

    def _note_fields(self, part: Part, note: Note) -> dict[str, Any]:
        """Logs, variables, and which choice this one was forked from."""
        if note.parent is None or not part.is_steered:
            return note.fields()
        return {"forked_from": self._numbers.of(part.number, note.parent)} | note.fields()

    def _logprobs(self, tokens: tuple[int, ...], entries: list[Any] | None) -> dict[str, Any] | None:
        if entries is None:
            return None
        return chat_logprobs(self.generation.model.tokenizer, tokens, entries, self.num_top)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.call_id}",
            "object": kind,
            "created": self.created,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "model": self.generation.model.name,
            "choices": choices,
        }


def _finish(output: CompletionOutput, has_calls: bool) -> str | None:
    reason = finish_reason(output)
    return "tool_calls" if has_calls and reason == "stop" else reason
