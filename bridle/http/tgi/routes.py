"""Routes of text-generation-inference: `/generate`, `/generate_stream`, `/`, `/tokenize`, `/chat_tokenize`, `/info`,
`/invocations`."""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

import bridle
from bridle.engine.multimodal.multimodal_inputs import NO_SIGHTS
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.http.api_route import checked_body
from bridle.http.middleware.request_context import run_while_connected
from bridle.http.openai.chat import chat_completions
from bridle.http.openai.completions import completions
from bridle.http.openai.schemas import ChatBody, CompletionBody
from bridle.http.sglang.generate import generate as sglangs_generate
from bridle.http.sglang.generate import is_sglangs
from bridle.http.sse import SseResponse
from bridle.http.state import HttpState, borrow, http_state, json_response, serving_of
from bridle.http.tei.routes import compat as pooled_compat
from bridle.http.tgi.answer import TgiResponse
from bridle.http.tgi.errors import TgiRoute, native_body
from bridle.http.tgi.plan import MAX_BEST_OF, MAX_TOP_TOKENS, check_truncate, max_input_tokens, plan_of, settled
from bridle.http.tgi.schemas import GenerateBody, base_name
from bridle.http.tgi.shapes import headers, stream_headers
from bridle.multimodal import Source, reads
from bridle.multimodal.modalities import IMAGE
from bridle.sampling import MAX_STOP_STRINGS
from bridle.serving import LoadedModel
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
from bridle.serving.lora.adapter_registry import PLACEHOLDER
from bridle.serving.requests.prompts import process_multimodal_async

#: The Markdown with which clients of vision models put an image into a prompt.
_IMAGE = re.compile(r"!\[\]\((?=data:image/|https?://)")
_DATA = "](data:image/"
_OTHER_FILE = re.compile(r"!\[\]\(data:((?:audio|video)/[\w.+-]{1,60})")

router = APIRouter(route_class=TgiRoute)


@router.post("/generate_stream", summary="Continue a text, token by token (text-generation-inference)")
async def generate_stream(body: GenerateBody, request: Request) -> Response:
    answer = await _prepare(body, request, is_stream=True)
    return _stream(answer, request)


_DESCRIBED = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/GenerateBody"}}},
    }
}


@router.post(
    "/generate",
    summary="Continue a text (text-generation-inference; with `text` or `input_ids` SGLang)",
    openapi_extra=_DESCRIBED,
)
async def generate(request: Request) -> Response:
    data = await request.json()
    if is_sglangs(data):
        return await sglangs_generate(data, request)
    return _whole(await _prepare(checked_body(GenerateBody, data), request, is_stream=False))


@router.post(
    "/",
    summary="Continue a text, streamed with `stream`; for pooling models, embeddings or labels",
    openapi_extra=_DESCRIBED,
)
async def root(request: Request) -> Response:
    return await compat(await request.json(), request)


async def compat(data: Any, request: Request) -> Response:
    """Answer a body with `inputs`, with a model that generates text or with a pooling model."""
    pooled = await pooled_compat(data, request)
    if pooled is not None:
        return pooled
    body = checked_body(GenerateBody, data)
    if body.stream:
        return _stream(await _prepare(body, request, is_stream=True, full_text=True), request)
    answer = await _prepare(body, request, is_stream=False, full_text=True)
    return _whole(answer, as_list=True)


async def _prepare(body: GenerateBody, request: Request, is_stream: bool, full_text: bool = False) -> TgiResponse:
    """Begin to answer a request. An invalid request is refused before generation begins."""
    return await run_while_connected(
        request.receive, _answer(body, serving_of(request, body.parameters.trace), is_stream, full_text)
    )


async def _answer(body: GenerateBody, serving: RequestLifecycle, is_stream: bool, full_text: bool) -> TgiResponse:
    given = body.parameters
    plan = plan_of(given, is_stream, full_text)
    if not body.inputs:
        raise InvalidRequest("inputs is empty; it must have at least one character", "inputs")
    model = await serving.acquire_model(
        body.model, given.adapter_id, n=plan.best_of, priority=given.priority, deadline=given.deadline
    )
    check_truncate(plan, model)
    text, sources = _split_pictures(body.inputs, model)
    steering = serving.steering(given, plan.constraint)
    tokens, sights = await serving.tokens([text], plan.truncate), NO_SIGHTS
    if sources:
        seen, sights = await process_multimodal_async(model, tokens[0], sources)
        tokens = [seen]
    sampling = settled(plan, given, model)
    generation = await serving.prepare(tokens, sampling, steering, apart=True, run=not is_stream, sights=sights)
    return TgiResponse(generation, plan, body.inputs)


def _split_pictures(inputs: str, model: LoadedModel) -> tuple[str, list[Source]]:
    """Replace each image in the text by a placeholder. Returns the text and the images."""
    if other := _OTHER_FILE.search(inputs):
        raise UnsupportedFeature(
            f"inputs has a file of type {other[1]!r}; {reads(model.name, model.modalities)}", "inputs"
        )
    if model.pictures is None or IMAGE not in model.modalities:
        if _DATA in inputs:
            raise UnsupportedFeature(f"inputs has an image; {reads(model.name, model.modalities)}", "inputs")
        return inputs, []
    before, *rest = _IMAGE.split(inputs)
    if not rest:
        return inputs, []
    place = model.tokenizer.token_text(model.pictures.placeholder)
    if place in inputs:
        raise InvalidRequest(
            f"inputs has the text {place!r}, which the model reads as an image placeholder; remove it", "inputs"
        )
    if len(rest) > model.pictures.limits.max_images:
        raise InvalidRequest(f"inputs has {len(rest)} images; at most {model.pictures.limits.max_images}", "inputs")
    texts, sources = [before], []
    for number, part in enumerate(rest, 1):
        url, end, after = part.partition(")")
        if not end:
            raise InvalidRequest(
                "inputs has an image whose closing parenthesis is missing; write ![](data:image/...;base64,...)",
                "inputs",
            )
        texts.append(after)
        sources.append(Source(url, f"inputs, image {number}"))
    return place.join(texts), sources


def _whole(answer: TgiResponse, as_list: bool = False) -> Response:
    generation = answer.generation
    content: Any = answer.whole()
    said = headers(generation.story, generation.model, len(answer.prompt), generation.usage)
    return json_response([content] if as_list else content, headers=said)


def _stream(answer: TgiResponse, request: Request) -> Response:
    response = SseResponse(answer.stream, http_state(request).settings, native_body)
    response.headers.update(stream_headers(answer.generation.model, len(answer.prompt)))
    return response


@router.get("/info", summary="What is served, and its limits (text-generation-inference)")
async def info(request: Request, model: str | None = None) -> Response:
    return json_response(_info(http_state(request), await borrow(request, base_name(model))))


def _info(http: HttpState, model: LoadedModel) -> dict[str, Any]:
    settings, limit, batching = http.settings, model.max_sequence_tokens, model.batching
    return {
        "model_id": model.name,
        "model_sha": None,
        "model_pipeline_tag": "text-generation",
        "model_dtype": model.info.dtype,
        "model_device_type": model.info.device,
        "max_concurrent_requests": settings.max_requests,
        "max_best_of": MAX_BEST_OF,
        "max_stop_sequences": MAX_STOP_STRINGS,
        "max_top_n_tokens": MAX_TOP_TOKENS,
        "max_input_tokens": max_input_tokens(model),
        "max_total_tokens": limit,
        "max_batch_size": batching.max_batch_size,
        "max_batch_prefill_tokens": batching.max_batch_prefill_tokens,
        "max_batch_total_tokens": batching.max_batch_total_tokens,
        "waiting_served_ratio": batching.waiting_served_ratio,
        "max_waiting_tokens": batching.max_waiting_tokens,
        "chunked_prefill": batching.chunked_prefill,
        "validation_workers": 1,
        "max_client_batch_size": settings.max_prompts,
        "input_modalities": ["text", *model.modalities],
        "adapters": [adapter.name for adapter in model.adapters.list()],
        "router": "bridle",
        "version": bridle.__version__,
        "sha": None,
        "docker_label": None,
    }


_ANY_BODY = {
    "anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("GenerateBody", "ChatBody", "CompletionBody")]
}
_ANY_DESCRIBED = {"requestBody": {"required": True, "content": {"application/json": {"schema": _ANY_BODY}}}}


@router.post(
    "/invocations",
    summary="Answer a text, a conversation or a completion, depending on the fields",
    openapi_extra=_ANY_DESCRIBED,
)
async def invocations(request: Request) -> Response:
    data = await request.json()
    fields = data if isinstance(data, dict) else {}
    if isinstance(name := fields.get("model"), str):
        fields["model"] = base_name(name)
    if "inputs" in fields:
        return await compat(fields, request)
    fields["model"] = fields.get("model") or PLACEHOLDER  # clients of this route want the default model
    if "messages" in fields:
        return await chat_completions(checked_body(ChatBody, fields), request)
    if "prompt" in fields:
        return await completions(checked_body(CompletionBody, fields), request)
    raise InvalidRequest("the body must have one of 'inputs', 'messages' and 'prompt'")
