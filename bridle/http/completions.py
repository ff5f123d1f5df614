"""`POST /v1/completions`: text in, text out; with `echo` and `logprobs` also the way to score given text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.http.call import call_of
from bridle.http.errors import json_response
from bridle.http.generation import Generation, Part, prepare, reserve
from bridle.http.identity import identity_of
from bridle.http.json_body import BoundedRoute
from bridle.http.logprob_shapes import CompletionLogprobs
from bridle.http.openai_shapes import finish_reason, usage_shape
from bridle.http.schemas import CompletionBody
from bridle.http.sse import SseResponse, SseWriter, run_while_connected
from bridle.http.state import http_state
from bridle.outputs import CompletionOutput
from bridle.sampling import SamplingParams
from bridle.service import Delta, LoadedModel, best_outputs

DEFAULT_MAX_TOKENS = 16

router = APIRouter(route_class=BoundedRoute)


@router.post("/v1/completions", summary="Continue a text")
async def completions(body: CompletionBody, request: Request) -> Response:
    http, call = http_state(request), call_of(request.scope)
    model = http.registry.resolve(body.model)
    plan = _plan(body, model)
    ticket = reserve(http, call, model, len(body.prompt), plan.sampling.n)
    tenant = identity_of(request).user
    generation = await prepare(http, call, model, ticket, body.prompt, plan.sampling, tenant)
    answer = _Answer(generation, plan, call.id)
    if body.stream:
        return SseResponse(answer.stream, http.settings)
    await run_while_connected(request.receive, generation.run())
    return json_response(answer.whole())


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a body comes down to. `num_wanted` choices per prompt are answered, of perhaps more that are made."""

    sampling: SamplingParams
    num_wanted: int
    num_logprobs: int | None
    echo: bool
    wants_usage: bool


def _plan(body: CompletionBody, model: LoadedModel) -> _Plan:
    if body.suffix:
        raise UnsupportedFeature(f"{model.name!r} cannot fill in between prompt and suffix; leave it out", "suffix")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    is_scoring = bool(body.echo) and max_tokens == 0
    prompt_logprobs = (body.logprobs or 0) if is_scoring else body.logprobs if body.echo else None
    sampling = body.sampling(max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs)
    num_wanted = sampling.n
    if is_scoring and num_wanted > 1:
        raise InvalidRequest(f"n is {num_wanted}; with max_tokens 0 there is only one choice", "n")
    best_of = body.best_of or num_wanted
    if best_of < num_wanted:
        raise InvalidRequest(f"best_of is {best_of}, less than n ({num_wanted})", "best_of")
    if best_of > num_wanted:
        if body.stream:
            raise InvalidRequest(f"best_of is {best_of}: the best are not known while streaming", "best_of")
        sampling = sampling.with_(n=best_of, logprobs=body.logprobs or 0)
    return _Plan(sampling, num_wanted, body.logprobs, bool(body.echo), body.wants_stream_usage)


@dataclass(slots=True)
class _Answer:
    """Writes the outputs of a generation in this route's shape."""

    generation: Generation
    plan: _Plan
    call_id: str
    created: int = field(default_factory=lambda: int(time.time()))
    _logprobs: dict[int, CompletionLogprobs] = field(default_factory=dict)

    def whole(self) -> dict[str, Any]:
        """The answer of a call that does not stream."""
        choices = []
        for part in self.generation.parts:
            outputs = part.outputs
            if len(outputs) > self.plan.num_wanted and self.plan.sampling.n > self.plan.num_wanted:
                outputs = best_outputs(outputs, self.plan.num_wanted)
            choices += [self._choice(part, output) for output in outputs]
        for index, choice in enumerate(choices):
            choice["index"] = index
        return self._envelope(choices) | {"usage": self._usage()}

    async def stream(self, writer: SseWriter) -> None:
        """The chunks of a call that streams."""

        async def sink(part: Part) -> None:
            chunks = [self._chunk(part, delta) for delta in part.reader.take()]
            await writer.send(*(chunk for chunk in chunks if chunk is not None))

        await self.generation.run(sink)
        if self.plan.wants_usage:
            await writer.send(self._envelope([]) | {"usage": self._usage()})
        await writer.done()

    def _choice(self, part: Part, output: CompletionOutput) -> dict[str, Any]:
        delta = Delta(0, output.text, tuple(output.token_ids), tuple(output.logprobs or ()), is_first=True)
        shape = CompletionLogprobs(self.generation.model.tokenizer)
        choice = self._content(part, delta, shape)
        choice |= {"finish_reason": finish_reason(output), "stop_reason": output.stop_reason}
        return choice | {"seed": part.request.sampling.seed}

    def _chunk(self, part: Part, delta: Delta) -> dict[str, Any] | None:
        index = part.number * self.plan.num_wanted + delta.index
        shape = self._logprobs.setdefault(index, CompletionLogprobs(self.generation.model.tokenizer))
        choice = {"index": index} | self._content(part, delta, shape)
        output = part.collector.growing[delta.index].output
        is_last = delta.is_last
        choice["finish_reason"] = finish_reason(output) if is_last else None
        choice["stop_reason"] = output.stop_reason if is_last else None
        if not (choice["text"] or choice["logprobs"] or is_last):
            return None
        if is_last:
            choice["seed"] = part.request.sampling.seed
        chunk = self._envelope([choice])
        return chunk | {"usage": None} if self.plan.wants_usage else chunk

    def _content(self, part: Part, delta: Delta, shape: CompletionLogprobs) -> dict[str, Any]:
        """Text and log-probabilities of a delta, after those of the prompt if it is echoed."""
        text, tokens, entries = delta.text, list(delta.tokens), list(delta.logprobs)
        if self.plan.echo and delta.is_first:
            output = part.collector.output
            text = self._prompt_text(part) + text
            tokens = output.prompt_token_ids + tokens
            entries = (output.prompt_logprobs or []) + entries
        num_top = self.plan.num_logprobs
        logprobs = shape.shape(text, tokens, entries, num_top > 0) if num_top is not None and entries else None
        return {"text": text, "logprobs": logprobs}

    def _prompt_text(self, part: Part) -> str:
        if isinstance(part.prompt, str):
            return part.prompt
        return self.generation.model.tokenizer.decode(part.prompt, skip_special_tokens=False)

    def _usage(self) -> dict[str, Any]:
        return usage_shape(self.generation.usage)

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self.call_id}",
            "object": "text_completion",
            "created": self.created,
            "model": self.generation.model.name,
            "choices": choices,
        }
