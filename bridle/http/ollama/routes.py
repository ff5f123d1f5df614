"""`POST /api/chat` and `POST /api/generate`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.chat.chat_request import ChatRequest, prepare_chat
from bridle.errors import ContextOverflow, InvalidRequest
from bridle.http.middleware.identity import check_admin
from bridle.http.middleware.request_context import call_of, run_while_connected
from bridle.http.ollama.answer import OllamaAnswer, Shape, chat_shape, text_shape
from bridle.http.ollama.bodies import OllamaRoute, described, read_body, served_name
from bridle.http.ollama.keep_alive import note_keep_alive
from bridle.http.ollama.ndjson import NdjsonResponse, Row, timestamp
from bridle.http.ollama.schemas import GeneratingBody, OllamaChatBody, OllamaGenerateBody, is_zero
from bridle.http.state import http_state, json_response, serving_of
from bridle.serving import LoadedModel
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
from bridle.serving.requests.request_builder import EventOptions

#: Fill-in-the-middle tokens of code models; each row is one family.
_INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
)

router = APIRouter(route_class=OllamaRoute)
MakeTurn = Callable[[RequestLifecycle], Awaitable[ChatRequest]]


@router.post("/api/chat", summary="Answer in a conversation (Ollama's API)", openapi_extra=described(OllamaChatBody))
async def chat(request: Request) -> Response:
    body = await read_body(OllamaChatBody, request)
    if not body.messages:
        return await _load_or_unload(body, request, chat_shape)

    async def turn(serving: RequestLifecycle) -> ChatRequest:
        return await _chat_turn(body, serving)

    return await _answered(body, request, turn, chat_shape)


@router.post(
    "/api/generate", summary="Continue or answer a text (Ollama's API)", openapi_extra=described(OllamaGenerateBody)
)
async def generate(request: Request) -> Response:
    body = await read_body(OllamaGenerateBody, request)
    if not (body.prompt or body.suffix or body.images):
        return await _load_or_unload(body, request, text_shape)

    async def turn(serving: RequestLifecycle) -> ChatRequest:
        if body.is_plain or not serving.model.tokenizer.chat_template.is_present:
            made = await _plain_turn(body, serving)
        else:
            made = await _chat_turn(body, serving)
        if not body.context:
            return made
        (context,) = await serving.tokens([body.context])
        events: EventOptions = {**made.events, "continues": ""}
        return replace(made, prompt=(*context, *made.prompt), rendered="", events=events)

    return await _answered(body, request, turn, text_shape, gives_context=not body.raw)


async def _answered(
    body: GeneratingBody, request: Request, make_turn: MakeTurn, shape: Shape, gives_context: bool = False
) -> Response:
    """Generate the response to a request. An invalid request is refused before the response begins."""
    body.check()
    serving = serving_of(request, body.trace)
    answer = await run_while_connected(request.receive, _answer(body, serving, make_turn, shape, gives_context))
    note_keep_alive(request, body.model, body.keep_alive)
    if not body.streams:
        return json_response(answer.whole())
    return NdjsonResponse(answer.stream, call_of(request.scope), http_state(request).settings)


async def _answer(
    body: GeneratingBody, serving: RequestLifecycle, make_turn: MakeTurn, shape: Shape, gives_context: bool
) -> OllamaAnswer:
    began = time.monotonic()
    model = await _acquire(body, serving)
    load_seconds = time.monotonic() - began
    turn = await make_turn(serving)
    if body.think and turn.tags is None:
        raise InvalidRequest(f"{model.name!r} does not support thinking; leave think out", "think")
    turn = within_context(turn, body.num_ctx, model)
    whole = not body.streams
    generation = await serving.prepare([turn.prompt], turn.sampling, turn.steering, run=whole, **turn.events)
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    name = body.model or model.name
    return OllamaAnswer(generation, turn, name, shape, load_seconds, num_top, gives_context)


def within_context(turn: ChatRequest, num_ctx: int | None, model: LoadedModel) -> ChatRequest:
    """Limit prompt and answer of a request to `num_ctx` tokens together. A `num_ctx` above the model's served context
    length has no effect."""
    if num_ctx is None or num_ctx >= model.max_sequence_tokens:
        return turn
    left = num_ctx - len(turn.prompt)
    if left < 1:
        raise ContextOverflow(
            f"options.num_ctx: got {num_ctx}, but the prompt has {len(turn.prompt)} tokens. Raise num_ctx to at most "
            f"{model.max_sequence_tokens}, or shorten the prompt",
            "options.num_ctx",
        )
    most = turn.sampling.max_tokens
    return replace(turn, sampling=turn.sampling.with_(max_tokens=left if most is None else min(most, left)))


async def _chat_turn(body: OllamaChatBody | OllamaGenerateBody, serving: RequestLifecycle) -> ChatRequest:
    chat = body.chat()
    return await prepare_chat(serving, chat.conversation(), body.drawn(serving.model), chat)


async def _acquire(body: GeneratingBody, serving: RequestLifecycle) -> LoadedModel:
    name = served_name(serving.host.registry, body.model)
    return await serving.acquire_model(
        name, body.adapter, priority=body.priority, deadline=body.deadline, must_name=True
    )


async def _plain_turn(body: OllamaGenerateBody, serving: RequestLifecycle) -> ChatRequest:
    """Return the request for a prompt that the model gets without a chat template."""
    if body.images:
        raise InvalidRequest(f"{serving.model.name!r} has no chat template, so it takes no images", "images")
    chat = body.chat()
    steering = serving.steering(chat, chat.form(), chat.rewind)
    prompt = await _plain_prompt(body, serving)
    return ChatRequest(prompt, body.drawn(serving.model), steering, None, None, False, False, events={})


async def _plain_prompt(body: OllamaGenerateBody, serving: RequestLifecycle) -> tuple[int, ...]:
    text = body.prompt or ""
    if not body.suffix:
        parts = [body.system, text] if body.system else [text]
        return (await serving.tokens(["\n\n".join(parts)]))[0]
    tokenizer = serving.model.tokenizer
    marks = next((ids for names in _INFILL if None not in (ids := [*map(tokenizer.id_of, names)])), None)
    if marks is None:
        raise InvalidRequest(f"{serving.model.name!r} does not support insert; leave suffix out", "suffix")
    pieces = [list(await _tokens(serving, each)) for each in (text, body.suffix)]
    begin, middle, end = (mark for mark in marks if mark is not None)
    return (begin, *pieces[0], middle, *pieces[1], end)


async def _tokens(serving: RequestLifecycle, text: str) -> tuple[int, ...]:
    return (await serving.tokens([text], add_special_tokens=False))[0] if text else ()


async def _load_or_unload(body: GeneratingBody, request: Request, shape: Shape) -> Response:
    """Respond to a request without a prompt: load the model, or unload it if `keep_alive` is 0."""
    http = http_state(request)
    name = served_name(http.registry, body.model)
    if not name:
        raise InvalidRequest("model is required", "model")
    if is_zero(body.keep_alive):
        check_admin(request)
        await http.registry.unload(name)
        return json_response(_empty(body, shape, "unload"))
    serving = serving_of(request)
    await run_while_connected(request.receive, serving.acquire_model(name, body.adapter, generates=False))
    note_keep_alive(request, name, body.keep_alive)
    return json_response(_empty(body, shape, "load"))


def _empty(body: GeneratingBody, shape: Shape, reason: str) -> Row:
    fields = {"model": body.model, "created_at": timestamp(), **shape("", "", [])}
    return fields | {"done": True, "done_reason": reason}
