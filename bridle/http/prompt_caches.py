"""`/v1/caches`: prompts whose KV a client retains, for itself or its group, until the client deletes them or they
expire."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.chat.cached_prompt import shared_prompt
from bridle.chat.conversation import Conversation
from bridle.engine.request import Retention
from bridle.errors import InvalidRequest, Unauthorized
from bridle.http.errors import RefusedBody
from bridle.http.fields import InnerFields
from bridle.http.middleware.identity import identity_of
from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.middleware.request_context import run_while_connected
from bridle.http.openai.schemas import MAX_MESSAGES, MAX_TOOLS, JsonObjects, Prompts, objects
from bridle.http.state import http_state, json_response, serving_of
from bridle.sampling import SamplingParams
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
from bridle.serving.prompt_caches import DEFAULT_TTL, CacheLimits, PromptCache, PromptCaches, read_ttl
from bridle.serving.tenancy.keys import Identity

#: Sampling of a prefill: the model computes the prompt and samples one token, which is dropped.
_PREFILL = SamplingParams(max_tokens=1, temperature=0.0)

router = APIRouter(route_class=BoundedRoute)


class CacheBody(InnerFields):
    """Body of `POST /v1/caches`: a prompt or messages, and the time for which their KV is retained."""

    model: str | None = None
    adapter: str | None = None
    prompt: Prompts | None = None
    messages: Annotated[JsonObjects | None, objects("messages", MAX_MESSAGES)] = None
    tools: Annotated[JsonObjects | None, objects("tools", MAX_TOOLS)] = None
    chat_template_kwargs: dict[str, Any] | None = None
    ttl: Any = DEFAULT_TTL
    share: bool = False


@router.post("/v1/caches", summary="Retain the KV of a prompt")
async def create(body: CacheBody, request: Request) -> Response:
    work = _create(body, serving_of(request), http_state(request).prompt_caches)
    return json_response(await run_while_connected(request.receive, work))


@router.get("/v1/caches", summary="The retained prompts of a user, and those shared with the user")
async def listing(request: Request) -> Response:
    identity = identity_of(request)
    seen = http_state(request).prompt_caches.visible_to(identity)
    return json_response({"object": "list", "data": [cache.fields(identity.user) for cache in seen]})


@router.get("/v1/caches/{cache_id}", summary="A retained prompt")
async def read(cache_id: str, request: Request) -> Response:
    identity = identity_of(request)
    return json_response(http_state(request).prompt_caches.find(identity, cache_id).fields(identity.user))


@router.post("/v1/caches/{cache_id}/prefetch", summary="Read or compute a retained prompt before it is needed")
async def prefetch(cache_id: str, request: Request) -> Response:
    work = _prefetch(cache_id, serving_of(request), http_state(request).prompt_caches)
    return json_response(await run_while_connected(request.receive, work))


@router.delete("/v1/caches/{cache_id}", summary="Retain a prompt no longer")
async def delete(cache_id: str, request: Request) -> Response:
    http = http_state(request)
    cache = _find_own(http.prompt_caches, identity_of(request), cache_id)
    http.prompt_caches.drop(cache)
    for model in http.registry:
        if model.name == cache.model:
            model.client.release_retained_kv(cache.id)
    return json_response({"id": cache.id, "object": "cache", "deleted": True})


def _find_own(caches: PromptCaches, identity: Identity, cache_id: str) -> PromptCache:
    """Return a prompt cache that belongs to this user. Raises `UnknownCache`, or an error with status 403 if another
    user shares the cache."""
    cache = caches.find(identity, cache_id)
    if cache.user != identity.user:
        problem = f"cache {cache_id!r} belongs to another user of the group; only its owner can prefetch or delete it"
        raise RefusedBody(403, Unauthorized(problem))
    return cache


def _group(body: CacheBody, identity: Identity) -> str:
    """Return the group that shares a new cache; empty if the cache is not shared."""
    if body.share and not identity.group:
        raise InvalidRequest(
            "share: got true, but this API key belongs to no group. The operator creates a key with a group: `bridle "
            "keys add USER --group GROUP`",
            "share",
        )
    return identity.group if body.share else ""


async def _create(body: CacheBody, serving: RequestLifecycle, caches: PromptCaches) -> dict[str, Any]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("the body must have exactly one of prompt and messages", "prompt")
    ttl, group = read_ttl(body.ttl), _group(body, serving.identity)
    model = await serving.acquire_model(body.model, body.adapter, must_name=True)
    tokens = await _tokens(body, serving)
    limits = CacheLimits.of(model.info, model.engine)
    cache = caches.add(serving.user, model.name, serving.adapter, tokens, ttl, limits, group)
    try:
        return await _compute(cache, serving)
    except BaseException:
        caches.drop(cache)
        model.client.release_retained_kv(cache.id)
        raise


async def _tokens(body: CacheBody, serving: RequestLifecycle) -> tuple[int, ...]:
    if body.messages is None:
        if len(body.prompt or ()) != 1:
            raise InvalidRequest(
                f"prompt: got {len(body.prompt or ())} prompts; a prompt cache has one prompt", "prompt"
            )
        return (await serving.tokens(body.prompt or []))[0]
    conversation = Conversation(body.messages, body.tools, variables=body.chat_template_kwargs or {})
    async with serving.bounded("its prompt was made"):
        return await serving.model.in_text_thread(shared_prompt, serving.model, conversation)


async def _prefetch(cache_id: str, serving: RequestLifecycle, caches: PromptCaches) -> dict[str, Any]:
    cache = _find_own(caches, serving.identity, cache_id)
    await serving.acquire_model(cache.model, cache.adapter)
    caches.renew(cache)
    return await _compute(cache, serving)


async def _compute(cache: PromptCache, serving: RequestLifecycle) -> dict[str, Any]:
    """Compute the prompt, or load its KV, and retain the KV. Returns the response fields of the cache, with the number
    of tokens that were cached before."""
    wish = Retention(len(cache.tokens), cache.ttl, cache.id)
    generation = await serving.prepare([tuple(cache.tokens)], _PREFILL, run=True, detokenize=False, retains=(wish,))
    usage = generation.usage
    found = {"retained_tokens": usage.retained_tokens, "cached_tokens": usage.cached_tokens}
    return cache.fields(serving.user) | {"usage": found}
