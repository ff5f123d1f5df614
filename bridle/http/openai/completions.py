"""`POST /v1/completions`: continues a text. With `echo` and `logprobs`, the response also has log-probabilities of the
prompt's tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.controllers.beams import BeamSearch
from bridle.errors import InvalidRequest
from bridle.http.event_template import TextTemplate
from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.middleware.request_context import run_while_connected
from bridle.http.openai import responses_common as common
from bridle.http.openai.beams import searching
from bridle.http.openai.logprobs import CompletionLogprobs, prompt_logprobs
from bridle.http.openai.schemas import CompletionBody
from bridle.http.sse import SseResponse, SseWriter, sse_event
from bridle.http.state import http_state, json_response, serving_of
from bridle.outputs import CompletionOutput
from bridle.sampling import SamplingParams
from bridle.serving import Delta, RewindPolicy, best_outputs
from bridle.serving.lifecycle.beam_search import found_beams
from bridle.serving.lifecycle.generation import Generation, SubRequest
from bridle.serving.lifecycle.live_text import LiveText
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
from bridle.serving.outputs.stream_extras import StreamExtras
from bridle.serving.requests.request_builder import EventOptions
from bridle.serving.requests.steering import Steering

DEFAULT_MAX_TOKENS = 16

router = APIRouter(route_class=BoundedRoute)


@router.post("/v1/completions", summary="Continue a text")
async def completions(body: CompletionBody, request: Request) -> Response:
    answer = await run_while_connected(request.receive, _answer(body, serving_of(request, body.trace)))
    return SseResponse(answer.stream, http_state(request).settings) if body.stream else json_response(answer.whole())


async def _answer(body: CompletionBody, serving: RequestLifecycle) -> _Answer:
    """Generate the answer to a request. The answer is complete unless the request streams."""
    asked, num_wanted = _sampling(body, serving.limit(DEFAULT_MAX_TOKENS))
    model = await serving.acquire_model(
        body.model,
        body.adapter,
        num_prompts=len(body.prompt),
        n=asked.n,
        priority=body.priority,
        deadline=body.deadline,
        must_name=True,
    )
    steering = serving.steering(body, body.form(), body.rewind)
    _check_steering(body, asked.n, num_wanted, steering)
    search = None
    if body.use_beam_search:
        sampling, search = searching(body, serving, asked, steering, asked.n)
        steering = Steering(search)
    else:
        sampling = body.filled(asked, model)
    truncate = body.truncate_prompt_tokens
    _check_truncate(truncate, model.max_sequence_tokens)
    tokens = await serving.tokens(body.prompt, truncate, body.add_special_tokens is not False)
    texts = body.prompt if truncate is None else ()
    tells_resuming = bool(body.stream and body.stream_options and body.stream_options.include_resuming)
    events: EventOptions = {**body.cache_options(serving.user), "tell_resuming": tells_resuming}
    generation = await serving.prepare(tokens, sampling, steering, texts=texts, run=not body.stream, **events)
    numbers = common.ChoiceIndexer(generation.parts, num_wanted)
    return _Answer(generation, body, asked, num_wanted, numbers, int(time.time()), search)


def _check_truncate(truncate: int | None, most: int) -> None:
    """Raise `InvalidRequest` if `truncate_prompt_tokens` is below 1 or above the context length."""
    if truncate is not None and not 1 <= truncate <= most:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {truncate}; must be between 1 and {most}", "truncate_prompt_tokens"
        )


def _sampling(body: CompletionBody, usual: int | None) -> tuple[SamplingParams, int]:
    """Return the sampling parameters of a body, and the number of choices to return per prompt. `usual` is the default
    token limit. With `best_of`, more choices are sampled than returned."""
    max_tokens = usual if body.max_tokens is None else body.max_tokens
    is_scoring = bool(body.echo) and max_tokens == 0
    echoed = (body.logprobs or 0) if is_scoring else body.logprobs if body.echo else None
    num_prompt = max((most for most in (echoed, body.prompt_logprobs) if most is not None), default=None)
    sampling = body.sampling(max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=num_prompt)
    num_wanted = sampling.n
    if is_scoring and num_wanted > 1:
        raise InvalidRequest(f"n is {num_wanted}; with max_tokens 0 it must be 1", "n")
    best_of = body.width(num_wanted)
    if body.use_beam_search:
        sampling = sampling.with_(n=best_of)
    elif best_of > num_wanted:
        if body.stream:
            raise InvalidRequest(
                f"best_of is {best_of}, which is not possible with stream: the best choices are known only at the end",
                "best_of",
            )
        sampling = sampling.with_(n=best_of, logprobs=body.logprobs or 0, keep_best=num_wanted)
    return sampling, num_wanted


def _check_steering(body: CompletionBody, n: int, num_wanted: int, steering: Steering) -> None:
    """Raise `InvalidRequest` for fields that cannot be combined with a controller."""
    if steering.controller is None or body.use_beam_search:
        return
    if n > num_wanted:
        raise InvalidRequest(
            f"best_of is {body.best_of}; with a controller it must be equal to n ({num_wanted})", "best_of"
        )
    if body.stream and body.logprobs is not None and steering.rewind is RewindPolicy.MARK:
        raise InvalidRequest("logprobs cannot be combined with rewind 'mark'; use 'event' or 'hold'", "rewind")


@dataclass(slots=True)
class _Answer:
    """Writes the outputs of a generation in the format of completions."""

    generation: Generation
    body: CompletionBody
    asked: SamplingParams
    num_wanted: int
    _numbers: common.ChoiceIndexer
    created: int
    search: BeamSearch | None = None
    _logprobs: dict[int, CompletionLogprobs] = field(default_factory=dict)
    _scored: set[int] = field(default_factory=set)  # choices whose first log-probabilities were sent

    def whole(self) -> dict[str, Any]:
        """Return the response of a request that does not stream."""
        choices = []
        for part in self.generation.parts:
            if self.search is not None:
                choices += self._beams(part, self.search)
                continue
            outputs = part.outputs
            if len(outputs) > self.num_wanted and self.asked.n > self.num_wanted:
                outputs = best_outputs(outputs, self.num_wanted)
            choices += [self._choice(part, output) for output in outputs]
        choices.sort(key=lambda choice: int(choice["index"]))
        return self._envelope(choices) | {"usage": self._usage()}

    async def stream(self, writer: SseWriter) -> None:
        """Send the chunks of a request that streams."""

        async def sink(part: SubRequest, events: object) -> LiveText | None:
            chunks = [self._chunk(part, delta, note) for delta, note in part.read()]
            await writer.send(*(chunk for chunk in chunks if chunk is not None))
            is_live = part.is_plain and self.body.logprobs is None
            return writer.live(TextTemplate(lambda text: self._event(part, text))) if is_live else None

        await self.generation.run(sink)
        writer.end(*([self._envelope([]) | {"usage": self._usage()}] if self.body.wants_stream_usage else ()))

    def _choice(self, part: SubRequest, output: CompletionOutput) -> dict[str, Any]:
        delta = Delta(0, output.text, tuple(output.token_ids), tuple(output.logprobs or ()), is_first=True)
        shape = CompletionLogprobs(self.generation.model.tokenizer)
        choice = {"index": self._numbers.of(part, output.index)} | self._content(part, delta, shape)
        choice |= {"finish_reason": common.finish_reason(output), "stop_reason": output.stop_reason}
        if choice["logprobs"]:
            choice["logprobs"] |= common.options_shape(part)
        choice |= self._numbers.fields(part, part.note(output.index))
        if self.body.prompt_logprobs is not None:
            entries = part.collector.output.prompt_logprobs or ()
            tokenizer = self.generation.model.tokenizer
            choice["prompt_logprobs"] = prompt_logprobs(tokenizer, entries, self.body.prompt_logprobs)
        return choice | {"seed": output.seed}

    def _beams(self, part: SubRequest, search: BeamSearch) -> list[dict[str, Any]]:
        """Return the best beams of a prompt as choices, each with its `score`."""
        tokenizer, wanted = self.generation.model.tokenizer, self.num_wanted
        choices = []
        for beam in found_beams(tokenizer, part.collector.output, search, self.asked, wanted):
            delta = Delta(0, beam.text, tuple(beam.token_ids), tuple(beam.logprobs or ()), is_first=True)
            choice: dict[str, Any] = {"index": part.number * wanted + beam.index, "score": beam.score}
            choice |= self._content(part, delta, CompletionLogprobs(tokenizer))
            choices.append(choice | {"finish_reason": common.finish_reason(beam), "stop_reason": None, "seed": None})
        return choices

    def _chunk(self, part: SubRequest, delta: Delta, note: StreamExtras | None) -> dict[str, Any] | None:
        index = self._numbers.of(part, delta.index)
        shape = self._logprobs.setdefault(index, CompletionLogprobs(self.generation.model.tokenizer))
        if delta.taken_tokens or delta.taken_chars:
            shape.rewind(delta.taken_chars)
        extra = common.rewind_fields(delta, part.policy) | self._numbers.fields(part, note)
        choice = {"index": index} | self._content(part, delta, shape) | extra
        output = part.collector.growing[delta.index].output
        is_last = delta.is_last
        choice["finish_reason"] = common.finish_reason(output) if is_last else None
        choice["stop_reason"] = output.stop_reason if is_last else None
        if not (choice["text"] or choice["logprobs"] or is_last or extra):
            return None
        if choice["logprobs"] and index not in self._scored:
            self._scored.add(index)
            choice["logprobs"] |= common.options_shape(part)
        if is_last:
            choice["seed"] = output.seed
        chunk = self._envelope([choice])
        return chunk | {"usage": None} if self.body.wants_stream_usage else chunk

    def _event(self, part: SubRequest, text: str) -> bytes:
        """Encode an event with more text for a sub-request with one choice."""
        return sse_event(self._chunk(part, Delta(0, text), None))

    def _content(self, part: SubRequest, delta: Delta, shape: CompletionLogprobs) -> dict[str, Any]:
        """Return text and log-probabilities of a delta. With `echo`, the first delta begins with the prompt's text and
        log-probabilities."""
        text, tokens, entries = delta.text, list(delta.tokens), list(delta.logprobs)
        if self.body.echo and delta.is_first:
            output = part.collector.output
            text = self._prompt_text(part) + text
            tokens = output.prompt_token_ids + tokens
            entries = (output.prompt_logprobs or []) + entries
        num_top = self.body.logprobs
        logprobs = shape.shape(text, tokens, entries, num_top) if num_top is not None and entries else None
        return {"text": text, "logprobs": logprobs}

    def _prompt_text(self, part: SubRequest) -> str:
        if part.text is not None and not part.is_steered:
            return part.text
        tokens = part.collector.output.prompt_token_ids  # a controller may have changed the prompt tokens
        return self.generation.model.tokenizer.decode(tokens, skip_special_tokens=False)

    def _usage(self) -> dict[str, Any]:
        return common.usage_shape(self.generation.usage)

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self.generation.story.id}",
            "object": "text_completion",
            "created": self.created,
            "system_fingerprint": common.SYSTEM_FINGERPRINT,
            "model": self.generation.served_name,
            "choices": choices,
        }
