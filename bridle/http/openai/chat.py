"""`POST /v1/chat/completions`: answers a conversation with the assistant's next message."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.chat.chat_request import ChatRequest, TurnReader, prepare_chat
from bridle.chat.stream_deltas import CallArguments, Content, StreamDelta, Thought, ToolCallStart
from bridle.controllers.beams import BeamSearch
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.http.event_template import TextTemplate, text_of
from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.middleware.request_context import run_while_connected
from bridle.http.openai import responses_common as common
from bridle.http.openai.beams import searching
from bridle.http.openai.logprobs import chat_logprobs, prompt_logprobs
from bridle.http.openai.schemas import ChatBody
from bridle.http.openai.tgi_client_chunks import is_native_client, native_chunks
from bridle.http.sse import SseResponse, SseWriter, sse_event
from bridle.http.state import http_state, json_response, serving_of
from bridle.outputs import ChatMessage, CompletionOutput, TokenEvent
from bridle.safe_repr import short_repr
from bridle.sampling import SamplingParams
from bridle.serving import Delta
from bridle.serving.lifecycle.beam_search import found_beams
from bridle.serving.lifecycle.generation import Generation, SubRequest
from bridle.serving.lifecycle.live_text import LiveText
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
from bridle.serving.outputs.stream_extras import StreamExtras
from bridle.serving.requests.request_builder import EventOptions
from bridle.serving.requests.steering import Steering

router = APIRouter(route_class=BoundedRoute)


@router.post("/v1/chat/completions", summary="Answer in a conversation")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    answer = await run_while_connected(request.receive, _answer(body, serving_of(request, body.trace)))
    return SseResponse(answer.stream, http_state(request).settings) if body.stream else json_response(answer.whole())


async def _answer(body: ChatBody, serving: RequestLifecycle) -> _Answer:
    """Generate the answer to a request. The answer is complete unless the request streams."""
    sampling = _sampling(body)
    width = body.width(sampling.n)
    model = await serving.acquire_model(
        body.model, body.adapter, n=width, priority=body.priority, deadline=body.deadline, must_name=True
    )
    if body.modalities not in (None, ["text"]):
        raise UnsupportedFeature(
            f"modalities is {short_repr(body.modalities)}; must be ['text'], because {model.name!r} writes only text",
            "modalities",
        )
    turn = await prepare_chat(serving, body.conversation(), sampling, body, tells_rewinds=True)
    steering, search = turn.steering, None
    if body.use_beam_search:
        sampling, search = searching(body, serving, turn.sampling, steering, width)
        steering = Steering(search)
    else:
        sampling = body.filled(turn.sampling, model) if model.defaults else turn.sampling
    tells_resuming = bool(body.stream and body.stream_options and body.stream_options.include_resuming)
    events: EventOptions = {**turn.events, **body.cache_options(serving.user), "tell_resuming": tells_resuming}
    generation = await serving.prepare([turn.prompt], sampling, steering, run=not body.stream, **events)
    parts = generation.parts
    numbers = common.ChoiceIndexer(parts, parts[0].request.sampling.n)
    return _Answer(generation, turn, body, numbers, int(time.time()), search)


def _sampling(body: ChatBody) -> SamplingParams:
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidRequest(
            f"max_tokens is {body.max_tokens} and max_completion_tokens is {body.max_completion_tokens}; "
            "send one of them",
            "max_completion_tokens",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = limits.pop() if limits else None
    sampling = body.sampling(max_tokens=max_tokens, logprobs=num_logprobs, prompt_logprobs=body.prompt_logprobs)
    if body.best_of not in (None, sampling.n) and not body.use_beam_search:
        raise InvalidRequest(f"best_of is {body.best_of}; in chat completions it needs use_beam_search", "best_of")
    return sampling


@dataclass(slots=True)
class _Answer:
    """Writes the outputs of a generation in the format of chat completions."""

    generation: Generation
    turn: ChatRequest
    body: ChatBody
    _numbers: common.ChoiceIndexer
    created: int
    search: BeamSearch | None = None
    _readers: dict[int, TurnReader] = field(default_factory=dict)
    _scored: set[int] = field(default_factory=set)  # choices whose first log-probabilities were sent

    def whole(self) -> dict[str, Any]:
        """Return the response of a request that does not stream."""
        choices = []
        for part in self.generation.parts:
            if self.search is not None:
                choices += self._beams(part, self.search)
                continue
            found = [(output, self.turn.message(output)) for output in part.outputs]
            choices += [self._choice(part, output, message) for output, message in found]
            self.turn.keep(self.generation.model, part.request, found)
        choices.sort(key=itemgetter("index"))
        answer = self._envelope("chat.completion", choices) | {"usage": self._usage()}
        if self.body.prompt_logprobs is not None:
            entries = self.generation.parts[0].collector.output.prompt_logprobs or ()
            tokenizer = self.generation.model.tokenizer
            answer["prompt_logprobs"] = prompt_logprobs(tokenizer, entries, self.body.prompt_logprobs)
        return answer

    def _beams(self, part: SubRequest, search: BeamSearch) -> list[dict[str, Any]]:
        """Return the best beams as choices, each with its `score`."""
        tokenizer, sampling = self.generation.model.tokenizer, self.turn.sampling
        beams = found_beams(tokenizer, part.collector.output, search, sampling, sampling.n)
        return [self._choice(part, beam, self.turn.message(beam), is_beam=True) for beam in beams]

    async def stream(self, writer: SseWriter) -> None:
        """Send the chunks of a request that streams."""
        is_native = is_native_client(self.body)
        convert = native_chunks() if is_native else None

        async def sink(part: SubRequest, events: object) -> LiveText | None:
            chunks = [chunk for delta, note in part.read() for chunk in self._chunks(part, delta, note)]
            await writer.send(*(map(convert, chunks) if convert else chunks))
            return None if is_native or self.body.logprobs else self._live(part, writer)

        await self.generation.run(sink)
        for part in self.generation.parts:
            read = ((each, self._readers.get(self._numbers.of(part, each.index))) for each in part.outputs)
            found = [(output, reader.found) for output, reader in read if reader is not None]
            self.turn.keep(self.generation.model, part.request, found)
        if is_native:
            return
        counts = self._envelope("chat.completion.chunk", []) | {"usage": self._usage()}
        writer.end(*([counts] if self.body.wants_stream_usage else ()))

    def _live(self, part: SubRequest, writer: SseWriter) -> LiveText | None:
        """Return an encoder for the tokens of a sub-request with one choice. Returns None if chunks need more fields
        than the text."""
        index = self._numbers.of(part, 0)
        reader = self._readers.get(index)
        if reader is None or not part.is_plain:
            return None
        if reader.is_plain:
            event = partial(self._content_event, index)
            return writer.live(TextTemplate(event, reader.add_content))
        return writer.live(partial(self._events, part))

    def _content_event(self, index: int, text: str) -> bytes:
        return sse_event(self._chunk(index, {"content": text}))

    def _events(self, part: SubRequest, tokens: list[TokenEvent]) -> bytes:
        """Encode tokens as events. The text of the tokens may contain reasoning and tool calls."""
        return b"".join(map(sse_event, self._chunks(part, Delta(0, text_of(tokens)), None)))

    def _choice(
        self, part: SubRequest, output: CompletionOutput, found: ChatMessage, is_beam: bool = False
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": found.content, "refusal": None, "annotations": []}
        if found.thoughts:
            message["reasoning_content"] = found.thoughts
        if found.calls:
            message["content"] = found.content or None
            message["tool_calls"] = [_call_shape(call.id, call.name, call.arguments) for call in found.calls]
        return {
            "index": output.index if is_beam else self._numbers.of(part, output.index),
            **({"score": output.score} if is_beam else {}),
            "message": message,
            "logprobs": self._logprobs(output.token_ids, output.logprobs, part),
            "finish_reason": common.finish_reason(output, bool(found.calls)),
            "stop_reason": None if is_beam else output.stop_reason,
            **({} if is_beam or part.notes is None else self._numbers.fields(part, part.note(output.index))),
            "seed": output.seed,
        }

    def _chunks(self, part: SubRequest, delta: Delta, note: StreamExtras | None) -> list[dict[str, Any]]:
        """Return the chunks with more output of a choice. The first chunk has the role, and the last chunk has the
        finish reason."""
        index = self._numbers.of(part, delta.index)
        if index not in self._readers:
            self._readers[index] = self.turn.reader()
        reader = self._readers[index]
        chunks = [self._chunk(index, {"role": "assistant", "content": ""})] if delta.is_first else []
        extra = common.rewind_fields(delta, part.policy) | self._numbers.fields(part, note)
        shown = self._num_shown(part, delta)
        first = part if index not in self._scored else None
        logprobs = self._logprobs(delta.tokens[:shown], list(delta.logprobs[:shown]), first) if shown else None
        if logprobs:
            self._scored.add(index)
        shapes = [_delta_shape(piece) for piece in reader.push(delta.text, delta.is_last)]
        if not shapes and (extra or logprobs):
            shapes = [{"content": ""}]
        for shape in shapes:
            chunks.append(self._chunk(index, shape, logprobs, extra))
            logprobs, extra = None, {}
        if delta.tokens[shown:] and (ending := self._logprobs(delta.tokens[shown:], list(delta.logprobs[shown:]))):
            chunks.append(self._chunk(index, {"content": ""}, ending))
        if delta.is_last:
            chunks.append(self._last_chunk(part, delta.index, reader.has_calls))
        return chunks

    def _num_shown(self, part: SubRequest, delta: Delta) -> int:
        """Return how many tokens of `delta` belong to its text: all except a special token at the end. A client that
        joins the tokens of a chunk must get the chunk's text."""
        if not delta.tokens or not part.request.sampling.skip_special_tokens:
            return len(delta.tokens)
        return len(delta.tokens) - (delta.tokens[-1] in self.generation.model.tokenizer.special_token_ids)

    def _last_chunk(self, part: SubRequest, index: int, has_calls: bool) -> dict[str, Any]:
        output = part.collector.growing[index].output
        chunk = self._chunk(self._numbers.of(part, index), {})
        chunk["choices"][0] |= {
            "finish_reason": common.finish_reason(output, has_calls),
            "stop_reason": output.stop_reason,
            "seed": output.seed,
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
        return chunk | {"usage": None} if self.body.wants_stream_usage else chunk

    def _usage(self) -> dict[str, Any]:
        outputs = [output for part in self.generation.parts for output in part.outputs]
        return common.usage_shape(
            self.generation.usage,
            sum(self.turn.num_thinking(output.token_ids) for output in outputs if self.turn.tags is not None),
        )

    def _logprobs(
        self, tokens: Sequence[int], entries: list[Any] | None, part: SubRequest | None = None
    ) -> dict[str, Any] | None:
        """Return the log-probabilities of tokens. If `part` is given, the log-probabilities of a `choice` constraint's
        options are included."""
        if entries is None or not self.body.logprobs:
            return None
        shape = chat_logprobs(self.generation.model.tokenizer, tokens, entries, self.body.top_logprobs or 0)
        return shape if part is None else shape | common.options_shape(part)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.generation.story.id}",
            "object": kind,
            "created": self.created,
            "system_fingerprint": common.SYSTEM_FINGERPRINT,
            "model": self.generation.served_name,
            "choices": choices,
        }


def _delta_shape(piece: StreamDelta) -> dict[str, Any]:
    """Convert a piece of the answer to the `delta` of a chunk."""
    match piece:
        case Thought():
            return {"reasoning_content": piece.text}
        case Content():
            return {"content": piece.text}
        case ToolCallStart():
            return {"tool_calls": [{"index": piece.number} | _call_shape(piece.id, piece.name, "")]}
        case CallArguments():
            return {"tool_calls": [{"index": piece.number, "function": {"arguments": piece.text}}]}


def _call_shape(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
