"""`/v1/caches`: prompts whose KV a client retains until it deletes them or their time is over."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.chat.cached_prompt import shared_prompt
from bridle.chat.conversation import Conversation
from bridle.engine.request import Retention
from bridle.errors import InvalidRequest
from bridle.http.fields import InnerFields
from bridle.http.middleware.identity import identity_of
from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.middleware.request_context import run_while_connected
from bridle.http.openai.schemas import MAX_MESSAGES, MAX_TOOLS, JsonObjects, Prompts, objects
from bridle.http.state import http_state, json_response, serving_of
from bridle.sampling import SamplingParams
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
from bridle.serving.prompt_caches import DEFAULT_TTL, CacheLimits, PromptCache, PromptCaches, read_ttl

#: The model computes the prompt and draws one token, which is dropped.
_PREFILL = SamplingParams(max_tokens=1, temperature=0.0)

router = APIRouter(route_class=BoundedRoute)


class CacheBody(InnerFields):
    """`POST /v1/caches`: a prompt or messages, and for how long their KV is retained."""

    model: str | None = None
    adapter: str | None = None
    prompt: Prompts | None = None
    messages: Annotated[JsonObjects | None, objects("messages", MAX_MESSAGES)] = None
    tools: Annotated[JsonObjects | None, objects("tools", MAX_TOOLS)] = None
    chat_template_kwargs: dict[str, Any] | None = None
    ttl: Any = DEFAULT_TTL


@router.post("/v1/caches", summary="Retain the KV of a prompt")
async def create(body: CacheBody, request: Request) -> Response:
    work = _create(body, serving_of(request), http_state(request).prompt_caches)
    return json_response(await run_while_connected(request.receive, work))


@router.get("/v1/caches", summary="The retained prompts of a user")
async def listing(request: Request) -> Response:
    own = http_state(request).prompt_caches.of_user(identity_of(request).user)
    return json_response({"object": "list", "data": [cache.fields() for cache in own]})


@router.get("/v1/caches/{cache_id}", summary="A retained prompt")
async def read(cache_id: str, request: Request) -> Response:
    return json_response(http_state(request).prompt_caches.find(identity_of(request).user, cache_id).fields())


@router.post("/v1/caches/{cache_id}/prefetch", summary="Read or compute a retained prompt before it is needed")
async def prefetch(cache_id: str, request: Request) -> Response:
    work = _prefetch(cache_id, serving_of(request), http_state(request).prompt_caches)
    return json_response(await run_while_connected(request.receive, work))


@router.delete("/v1/caches/{cache_id}", summary="Retain a prompt no longer")
async def delete(cache_id: str, request: Request) -> Response:
    http = http_state(request)
    cache = http.prompt_caches.find(identity_of(request).user, cache_id)
    http.prompt_caches.drop(cache)
    for model in http.registry:
        if model.name == cache.model:
            model.client.release_retained_kv(cache.id)
    return json_response({"id": cache.id, "object": "cache", "deleted": True})


async def _create(body: CacheBody, serving: RequestLifecycle, caches: PromptCaches) -> dict[str, Any]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt: got both or neither of prompt and messages; send one of them", "prompt")
    ttl = read_ttl(body.ttl)
    model = await serving.acquire_model(body.model, body.adapter, must_name=True)
    tokens = await _tokens(body, serving)
    limits = CacheLimits.of(model.info, model.engine)
    cache = caches.add(serving.user, model.name, serving.adapter, tokens, ttl, limits)
    try:
        return await _compute(cache, serving)
    except BaseException:
        caches.drop(cache)
        model.client.release_retained_kv(cache.id)
        raise


async def _tokens(body: CacheBody, serving: RequestLifecycle) -> tuple[int, ...]:
    if body.messages is None:
        if len(body.prompt or ()) != 1:
            raise InvalidRequest(f"prompt: got {len(body.prompt or ())} prompts; a cache has one", "prompt")
        return (await serving.tokens(body.prompt or []))[0]
    conversation = Conversation(body.messages, body.tools, variables=body.chat_template_kwargs or {})
    async with serving.bounded("its prompt was made"):
        return await serving.model.in_text_thread(shared_prompt, serving.model, conversation)


async def _prefetch(cache_id: str, serving: RequestLifecycle, caches: PromptCaches) -> dict[str, Any]:
    cache = caches.find(serving.user, cache_id)
    await serving.acquire_model(cache.model, cache.adapter)
    caches.renew(cache)
    return await _compute(cache, serving)


async def _compute(cache: PromptCache, serving: RequestLifecycle) -> dict[str, Any]:
    """Compute the prompt, or read its KV, and retain it. Returns the cache, and what of its tokens was found."""
    wish = Retention(len(cache.tokens), cache.ttl, cache.id)
    generation = await serving.prepare([tuple(cache.tokens)], _PREFILL, run=True, detokenize=False, retains=(wish,))
    usage = generation.usage
    found = {"retained_tokens": usage.retained_tokens, "cached_tokens": usage.cached_tokens}
    return cache.fields() | {"usage": found}
