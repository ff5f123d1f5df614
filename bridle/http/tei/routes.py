"""Embeddings, labels and similarities of texts, in the format of text-embeddings-inference: plain lists."""

from __future__ import annotations

from array import array
from operator import mul
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.errors import InvalidRequest
from bridle.http.api_route import checked_body
from bridle.http.middleware.request_context import run_while_connected
from bridle.http.state import http_state, json_response, serving_of
from bridle.http.tei.schemas import EmbedBody, PredictBody, SimilarityBody
from bridle.http.tgi.errors import TgiRoute
from bridle.http.tgi.schemas import base_name
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
from bridle.serving.requests import pooling_inputs

router = APIRouter(route_class=TgiRoute)


@router.post("/embed", summary="Vectors of texts (text-embeddings-inference)")
async def embed(body: EmbedBody, request: Request) -> Response:
    vectors = await run_while_connected(request.receive, _vectors(body, body.inputs, serving_of(request)))
    return Response(b"[" + b",".join(vectors) + b"]", media_type="application/json")


async def _vectors(body: EmbedBody, texts: list[Any], serving: RequestLifecycle) -> list[bytes]:
    """Return each embedding as JSON. Embeddings are encoded one by one, so that a long response does not delay other
    requests."""
    at_once = await body.hold(serving, len(texts))
    pooling_inputs.check_embeds(serving.model, body.dimensions)
    tokens = await pooling_inputs.read_texts(serving, texts, pooling_inputs.PoolingOptions(body.prompt_name, body.cut))
    rows = [b""] * len(tokens)

    def keep(number: int, vector: array[float]) -> None:
        rows[number] = msgspec.json.encode(
            pooling_inputs.shaped(serving.model, vector, body.dimensions, body.normalize is not False).tolist()
        )

    await pooling_inputs.run_vectors(serving, tokens, at_once, keep)
    return rows


@router.post("/similarity", summary="How close texts are to one (text-embeddings-inference)")
async def similarity(body: SimilarityBody, request: Request) -> Response:
    return json_response(await run_while_connected(request.receive, _similarities(body, serving_of(request))))


async def _similarities(body: SimilarityBody, serving: RequestLifecycle) -> list[float]:
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    if not all(texts):
        raise InvalidRequest("inputs has an empty text; a text must have at least one character", "inputs")
    at_once = await body.hold(serving, len(texts))
    pooling_inputs.check_embeds(serving.model, None)
    tokens = await pooling_inputs.read_texts(serving, texts, pooling_inputs.PoolingOptions(truncate=body.cut))
    vectors: dict[int, array[float]] = {}

    def keep(number: int, vector: array[float]) -> None:
        vectors[number] = pooling_inputs.shaped(serving.model, vector)

    await pooling_inputs.run_vectors(serving, tokens, at_once, keep)
    return [sum(map(mul, vectors[0], vectors[number])) for number in range(1, len(texts))]


@router.post("/predict", summary="Labels of texts and of pairs, the most probable first (text-embeddings-inference)")
async def predict(body: PredictBody, request: Request) -> Response:
    rows = await run_while_connected(request.receive, _predictions(body, serving_of(request)))
    return json_response(rows if body.inputs.is_batch else rows[0])


async def _predictions(body: PredictBody, serving: RequestLifecycle) -> list[list[dict[str, Any]]]:
    items = body.inputs.items
    at_once = await body.hold(serving, len(items))
    model, wanted = serving.model, body.parameters
    pooling_inputs.check_classifies(model)
    assert model.pooling is not None  # it classifies
    labels = model.pooling.labels
    told = None if wanted is None else wanted.function_to_apply
    activation = "identity" if body.raw_scores or told == "none" else told or pooling_inputs.activation_of(model)
    most = None if wanted is None else wanted.top_k
    rows: list[list[dict[str, Any]]] = [[]] * len(items)

    def keep(number: int, logits: array[float]) -> None:
        scores = pooling_inputs.activated(logits, activation)
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:most]
        rows[number] = [{"score": scores[i], "label": labels[i]} for i in order]

    await pooling_inputs.run_vectors(
        serving,
        await pooling_inputs.read_texts(serving, items, pooling_inputs.PoolingOptions(truncate=body.cut)),
        at_once,
        keep,
    )
    return rows


async def compat(data: Any, request: Request) -> Response | None:
    """Answer `POST /` for a pooling model, as hosted endpoints do. Returns None if the model generates text or is not
    loaded. The Hugging Face client expects a list of lists of labels from this route."""
    registry, fields = http_state(request).registry, data if isinstance(data, dict) else {}
    name = fields.get("model")
    chosen = registry.choose(base_name(name) if isinstance(name, str) else None)
    model = registry.slot_of(chosen.model).model
    if model is None or model.info.task == "generate":
        return None
    if model.info.task == "classify":
        body = checked_body(PredictBody, fields)
        rows = await run_while_connected(request.receive, _predictions(body, serving_of(request)))
        return json_response(rows)
    if isinstance(fields.get("inputs"), dict):
        return await similarity(checked_body(SimilarityBody, fields), request)
    return await embed(checked_body(EmbedBody, fields), request)
