"""`POST /api/embed`, and the older `POST /api/embeddings`: embeddings of texts."""

from __future__ import annotations

import time
from array import array

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.http.chunked_json import ChunkedJsonResponse
from bridle.http.middleware.request_context import call_of, run_while_connected
from bridle.http.ollama.bodies import OllamaRoute, described, read_body, served_name
from bridle.http.ollama.keep_alive import note_keep_alive
from bridle.http.ollama.ndjson import nanoseconds
from bridle.http.ollama.schemas import EmbedBody, EmbeddingsBody
from bridle.http.openai.embeddings import TextsBody
from bridle.http.state import json_response, serving_of
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
from bridle.serving.requests import pooling_inputs

router = APIRouter(route_class=OllamaRoute)


@router.post("/api/embed", summary="Vectors of texts (Ollama's API)", openapi_extra=described(EmbedBody))
async def embed(request: Request) -> Response:
    body = await read_body(EmbedBody, request)
    texts, call = body.texts(), call_of(request.scope)
    truncate = None if body.truncate is False else pooling_inputs.AS_FITS
    rows, load_seconds = await run_while_connected(
        request.receive, _vectors(body, texts, serving_of(request), truncate, body.dimensions)
    )
    fields = {
        "model": body.model or call.model,
        "total_duration": nanoseconds(time.monotonic() - call.began),
        "load_duration": nanoseconds(load_seconds),
        "prompt_eval_count": call.num_prompt,
    }
    note_keep_alive(request, body.model, body.keep_alive)
    call.resources.close()  # a client that reads slowly does not block other requests
    return ChunkedJsonResponse(rows, "embeddings", fields)


@router.post(
    "/api/embeddings", summary="The vector of one text (Ollama's older API)", openapi_extra=described(EmbeddingsBody)
)
async def embeddings(request: Request) -> Response:
    body = await read_body(EmbeddingsBody, request)
    if not body.prompt:
        return json_response({"embedding": []})
    rows, _ = await run_while_connected(
        request.receive, _vectors(body, [body.prompt], serving_of(request), pooling_inputs.AS_FITS)
    )
    note_keep_alive(request, body.model, body.keep_alive)
    return json_response({"embedding": msgspec.Raw(rows[0])})


async def _vectors(
    body: TextsBody, texts: list[str], serving: RequestLifecycle, truncate: int | None, dimensions: int | None = None
) -> tuple[list[bytes], float]:
    """Return the embedding of each text as JSON, and the seconds that the model took to load."""
    began = time.monotonic()
    body.model = served_name(serving.host.registry, body.model)
    if not texts:
        await serving.acquire_model(body.model, body.adapter, generates=False, must_name=True)
        return [], time.monotonic() - began
    at_once = await body.hold(serving, len(texts))
    load_seconds = time.monotonic() - began
    pooling_inputs.check_embeds(serving.model, dimensions)
    tokens = await pooling_inputs.read_texts(serving, texts, pooling_inputs.PoolingOptions(None, truncate))
    rows = [b""] * len(tokens)

    def keep(number: int, vector: array[float]) -> None:
        rows[number] = msgspec.json.encode(pooling_inputs.shaped(serving.model, vector, dimensions).tolist())

    await pooling_inputs.run_vectors(serving, tokens, at_once, keep)
    return rows, load_seconds
