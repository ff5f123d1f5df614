"""`POST /generate` with SGLang's body, which is distinguished from text-generation-inference's body by its fields.
Answers and errors have SGLang's format."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import Response

from bridle.errors import BridleError
from bridle.http.api_route import checked_body
from bridle.http.errors import describe_validation, error_response, note_error
from bridle.http.middleware.request_context import run_while_connected
from bridle.http.sglang.answer import SglangResponse
from bridle.http.sglang.schemas import DEFAULT_MAX_TOKENS, SglangBody
from bridle.http.sse import SseResponse
from bridle.http.state import http_state, json_response, serving_of
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle

#: A body with one of these fields, and without `inputs`, has SGLang's format.
_MARKS = frozenset({"text", "input_ids", "input_embeds", "sampling_params"})


def is_sglangs(data: Any) -> bool:
    """Return whether a body has SGLang's format."""
    return isinstance(data, dict) and "inputs" not in data and not _MARKS.isdisjoint(data)


async def generate(data: Any, request: Request) -> Response:
    """Respond to a body in SGLang's format."""
    try:
        body = checked_body(SglangBody, data)
        answer = await run_while_connected(request.receive, _answer(body, serving_of(request, body.trace)))
    except RequestValidationError as error:
        return _refusal(request, describe_validation(error.errors()))
    except BridleError as error:
        return _refusal(request, error)
    if body.stream:
        return SseResponse(answer.stream, http_state(request).settings)
    return json_response(answer.whole())


def _refusal(request: Request, error: BridleError) -> Response:
    note_error(request, error)
    return error_response(error)


async def _answer(body: SglangBody, serving: RequestLifecycle) -> SglangResponse:
    """Generate the response to a request. An invalid request is refused before the response begins. The response is
    complete unless the request streams."""
    try:
        given = body.completion(serving.limit(DEFAULT_MAX_TOKENS))
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
    num_top = body.num_top_logprobs
    scored = None if body.logprobs_from is None else num_top
    wanted = given.sampling(max_tokens=given.max_tokens, logprobs=num_top, prompt_logprobs=scored)
    model = await serving.acquire_model(
        given.model,
        given.adapter,
        num_prompts=len(given.prompt),
        n=wanted.n,
        priority=given.priority,
        deadline=given.deadline,
    )
    steering = serving.steering(given, given.form())
    tokens = await serving.tokens(given.prompt, None, given.add_special_tokens is not False)
    generation = await serving.prepare(tokens, given.filled(wanted, model), steering, run=not given.stream)
    return SglangResponse(generation, body, wanted.n, len(given.prompt))
