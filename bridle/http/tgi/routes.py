"""The native routes: `/generate`, `/generate_stream`, `/`, `/tokenize`, `/chat_tokenize`, `/info`, `/invocations`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.http.control import Steering, steering_of
from bridle.http.errors import json_response
from bridle.http.generation import prepare, reserve, tokens_of
from bridle.http.models import hold
from bridle.http.openai.schemas import SamplingFields
from bridle.http.state import http_state
from bridle.http.terms import take_terms
from bridle.http.tgi.answer import Answer
from bridle.http.tgi.errors import NativeRoute, native_body
from bridle.http.tgi.plan import Plan, check_truncate, plan_of
from bridle.http.tgi.schemas import GenerateBody, Parameters
from bridle.http.tgi.shapes import headers, stream_headers
from bridle.http.transport.call import call_of
from bridle.http.transport.identity import identity_of
from bridle.http.transport.sse import SseResponse, run_while_connected
from bridle.service import LoadedModel

#: The text by which clients of models that see put an image into a prompt.
_IMAGE = "](data:image/"

router = APIRouter(route_class=NativeRoute)


@router.post("/generate", summary="Continue a text (text-generation-inference)")
async def generate(body: GenerateBody, request: Request) -> Response:
    answer = await _prepare(body, request, is_stream=False)
    return await _whole(answer, request)


@router.post("/generate_stream", summary="Continue a text, token by token (text-generation-inference)")
async def generate_stream(body: GenerateBody, request: Request) -> Response:
    answer = await _prepare(body, request, is_stream=True)
    return _stream(answer, request)


@router.post("/", summary="Either of both, told by `stream`; answers with a list of one")
async def compat(body: GenerateBody, request: Request) -> Response:
    if body.stream:
        return _stream(await _prepare(body, request, is_stream=True, full_text=True), request)
    answer = await _prepare(body, request, is_stream=False, full_text=True)
    return await _whole(answer, request, as_list=True)


async def _prepare(body: GenerateBody, request: Request, is_stream: bool, full_text: bool = False) -> Answer:
    """Prepare a call. Everything that can be refused is refused here, before anything runs."""
    http, call = http_state(request), call_of(request.scope)
    take_terms(body.parameters, request)
    plan = plan_of(body.parameters, is_stream, full_text)
    if not body.inputs:
        raise InvalidRequest("inputs is empty; it must have at least one character", "inputs")
    model, adapter = await hold(request, body.model, body.parameters.adapter_id)
    check_truncate(plan, model)
    if _IMAGE in body.inputs:
        raise UnsupportedFeature(f"inputs has an image; {model.name!r} reads only text", "inputs")
    ticket = reserve(http, call, model, 1, plan.best_of)
    steering = _steering(body.parameters, plan, request, model)
    (tokens,) = await tokens_of(model, call, [body.inputs], plan.truncate)
    tenant = identity_of(request).user
    generation = await prepare(
        http, call, model, ticket, [list(tokens)], plan.sampling, tenant, steering, adapter, apart=True
    )
    return Answer(generation, plan, body.inputs)


def _steering(given: Parameters, plan: Plan, request: Request, model: LoadedModel) -> Steering:
    fields = SamplingFields(n=plan.best_of, controller=given.controller, controller_arg=given.controller_arg)
    steering = steering_of(fields, request, model)
    if plan.constraint is None:
        return steering
    if steering.controller is not None:
        raise InvalidRequest("a controller and a grammar were given; a request has one of them", "controller")
    return Steering(constraint=plan.constraint)


async def _whole(answer: Answer, request: Request, as_list: bool = False) -> Response:
    generation = answer.generation
    await run_while_connected(request.receive, generation.run())
    content: Any = answer.whole()
    said = headers(generation.call, generation.model, len(answer.prompt), generation.usage)
    return json_response([content] if as_list else content, headers=said)


def _stream(answer: Answer, request: Request) -> Response:
    response = SseResponse(answer.stream, http_state(request).settings, native_body)
    response.headers.update(stream_headers(answer.generation.model, len(answer.prompt)))
    return response
