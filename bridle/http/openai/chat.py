"""`POST /v1/chat/completions`: takes a conversation, and gives the assistant's turn."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.chat.tools.pieces import CallArguments, CallBegun, Content, Found, Piece, Thought
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.http.errors import json_response
from bridle.http.generation import Generation, Part, reserve
from bridle.http.models import hold
from bridle.http.notes import Note
from bridle.http.openai.logprobs import chat_logprobs
from bridle.http.openai.native_chunks import is_native_client, native_chunks
from bridle.http.openai.schemas import ChatBody
from bridle.http.openai.shapes import SYSTEM_FINGERPRINT, ChoiceNumbers, finish_reason, rewind_fields, usage_shape
from bridle.http.openai.turn import Turn, TurnReader, plan_turn, prepare_turn
from bridle.http.state import http_state
from bridle.http.terms import take_terms
from bridle.http.transport.call import call_of
from bridle.http.transport.json_body import BoundedRoute
from bridle.http.transport.sse import SseResponse, SseWriter, run_while_connected
from bridle.outputs import CompletionOutput
from bridle.sampling import SamplingParams
from bridle.service import Delta
from bridle.shown import shown

_UNKEPT = {
    "functions": "send them as tools",
    "function_call": "send it as tool_choice",
    "audio": "{model} writes only text",
    "web_search_options": "this server looks nothing up; offer a tool that does",
}

router = APIRouter(route_class=BoundedRoute)


@router.post("/v1/chat/completions", summary="Answer in a conversation")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    http, call = http_state(request), call_of(request.scope)
    take_terms(body, request)
    served = await hold(request, body.model, body.adapter)
    _check_promises(body, served.model.name)
    sampling = _sampling(body)
    ticket = reserve(http, call, served.model, 1, sampling.n)
    turn = await plan_turn(body, request, served.model, sampling, tells_rewinds=True)
    generation = await prepare_turn(turn, request, served, ticket, body.wants_resuming)
    is_native = is_native_client(body)
    answer = _Answer(generation, turn, call.id, body.top_logprobs or 0, body.wants_stream_usage, is_native)
    if body.stream:
        return SseResponse(answer.stream, http.settings)
    await run_while_connected(request.receive, generation.run())
    return json_response(answer.whole())


def _check_promises(body: ChatBody, model: str) -> None:
    """Refuse options that this server could not honour."""
    for name, advice in _UNKEPT.items():
        if getattr(body, name) is not None:
            raise UnsupportedFeature(f"{name} is given; {advice.format(model=repr(model))}", name)
    if body.modalities not in (None, ["text"]):
        raise UnsupportedFeature(f"modalities is {shown(body.modalities)}; {model!r} writes only text", "modalities")


def _sampling(body: ChatBody) -> SamplingParams:
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidRequest(
            f"max_tokens is {body.max_tokens} and max_completion_tokens is {body.max_completion_tokens}; "
            "send one of them",
            "max_completion_tokens",
        )
    return body.sampling(max_tokens=limits.pop() if limits else None, logprobs=body.num_logprobs())


@dataclass(slots=True)
class _Answer:
    """Writes the outputs of a generation in this route's shape."""

    generation: Generation
    turn: Turn
    call_id: str
    num_top: int
    wants_usage: bool
    is_native: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    _readers: dict[int, TurnReader] = field(default_factory=dict)
    _numbers: ChoiceNumbers = field(init=False)

    def __post_init__(self) -> None:
        parts = self.generation.parts
        self._numbers = ChoiceNumbers(len(parts), 1 if parts[0].is_steered else parts[0].request.sampling.n)

    def whole(self) -> dict[str, Any]:
        """The answer of a call that does not stream."""
        choices = [self._choice(part, output) for part in self.generation.parts for output in part.outputs]
        choices.sort(key=lambda choice: int(choice["index"]))
        return self._envelope("chat.completion", choices) | {"usage": self._usage()}

    async def stream(self, writer: SseWriter) -> None:
        """The chunks of a call that streams."""

        convert = native_chunks() if self.is_native else None

        async def sink(part: Part) -> None:
            chunks = [chunk for delta, note in part.take() for chunk in self._chunks(part, delta, note)]
            await writer.send(*(map(convert, chunks) if convert else chunks))

        await self.generation.run(sink)
        if self.is_native:
            return
        counts = self._envelope("chat.completion.chunk", []) | {"usage": self._usage()}
        writer.end(*([counts] if self.wants_usage else ()))

    def _choice(self, part: Part, output: CompletionOutput) -> dict[str, Any]:
        found = Found().add(self.turn.reader(is_whole=True).push(output.text, is_last=True))
        message: dict[str, Any] = {"role": "assistant", "content": found.content, "refusal": None}
        if found.thoughts:
            message["reasoning_content"] = found.thoughts
        if found.calls:
            message["content"] = found.content or None
            message["tool_calls"] = [_call_shape(call.id, call.name, call.arguments) for call in found.calls]
        return {
            "index": self._numbers.of(part.number, output.index),
            "message": message,
            "logprobs": self._logprobs(part, tuple(output.token_ids), output.logprobs),
            "finish_reason": _finish(output, bool(found.calls)),
            "stop_reason": output.stop_reason,
            **self._note_fields(part, part.notes.take(output.index)),
            "seed": part.request.sampling.seed,
        }

    def _chunks(self, part: Part, delta: Delta, note: Note) -> list[dict[str, Any]]:
        """The chunks of a delta. The first chunk of a choice carries its role, the last one how it ended."""
        index = self._numbers.of(part.number, delta.index)
        if index not in self._readers:
            self._readers[index] = self.turn.reader()
        reader = self._readers[index]
        chunks = [self._chunk(index, {"role": "assistant", "content": ""})] if delta.is_first else []
        extra = rewind_fields(delta, part.policy) | self._note_fields(part, note)
        logprobs = self._logprobs(part, delta.tokens, list(delta.logprobs)) if delta.tokens else None
        shapes = [_delta_shape(piece) for piece in reader.push(delta.text, delta.is_last)]
        if not shapes and (extra or logprobs):
            shapes = [{"content": ""}]
        for shape in shapes:
            chunks.append(self._chunk(index, shape, logprobs, extra))
            logprobs, extra = None, {}
        if delta.is_last:
            chunks.append(self._last_chunk(part, delta.index, reader.has_calls))
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

    def _usage(self) -> dict[str, Any]:
        outputs = [output for part in self.generation.parts for output in part.outputs]
        return usage_shape(self.generation.usage, sum(self.turn.num_thinking(output.token_ids) for output in outputs))

    def _logprobs(self, part: Part, tokens: tuple[int, ...], entries: list[Any] | None) -> dict[str, Any] | None:
        if entries is None or part.request.sampling.logprobs is None:
            return None
        return chat_logprobs(self.generation.model.tokenizer, tokens, entries, self.num_top)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.call_id}",
            "object": kind,
            "created": self.created,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "model": self.generation.served_name,
            "choices": choices,
        }


def _finish(output: CompletionOutput, has_calls: bool) -> str | None:
    reason = finish_reason(output)
    return "tool_calls" if has_calls and reason == "stop" else reason


def _delta_shape(piece: Piece) -> dict[str, Any]:
    """A piece of the answer in the form of a chunk's delta."""
    match piece:
        case Thought():
            return {"reasoning_content": piece.text}
        case Content():
            return {"content": piece.text}
        case CallBegun():
            return {"tool_calls": [{"index": piece.number} | _call_shape(piece.id, piece.name, "")]}
        case CallArguments():
            return {"tool_calls": [{"index": piece.number, "function": {"arguments": piece.text}}]}


def _call_shape(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
