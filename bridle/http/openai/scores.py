"""Routes for the similarity of texts: `/v1/score` (vLLM's format), `/v1/rerank` (the format of Jina and Cohere), and
`/rerank` with `texts` (the format of text-embeddings-inference).

A cross-encoder, which is a classifier with one label, reads both texts together and scores the pair. With other models,
a score is the cosine of the two texts' embeddings, as `/v1/embeddings` returns them. vLLM has the same rule for
embedding models. A text that occurs several times in a request is computed once.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from operator import mul
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, WithJsonSchema
from starlette.responses import Response

from bridle.errors import InvalidRequest
from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.middleware.request_context import RequestContext, call_of, run_while_connected
from bridle.http.openai.embeddings import TextsBody
from bridle.http.state import json_response, serving_of
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
from bridle.serving.requests import pooling_inputs

router = APIRouter(route_class=BoundedRoute)

Pair = tuple[str, str]


def _texts(value: Any) -> Any:
    """Validate one text or a list of texts; each is a string, or an object with a `text`."""
    values = value if isinstance(value, list) else [value]
    texts = [item.get("text") if isinstance(item, dict) else item for item in values]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("must be a text or a list of texts, each with at least one character")
    return texts


_TEXT = {"anyOf": [{"type": "string"}, {"type": "object", "properties": {"text": {"type": "string"}}}]}
Texts = Annotated[
    list[str], BeforeValidator(_texts), WithJsonSchema({"anyOf": [*_TEXT["anyOf"], {"type": "array", "items": _TEXT}]})
]


class ScoreBody(TextsBody):
    """Body of `POST /v1/score`: one `text_1` for every `text_2`, or lists of equal length that form pairs."""

    text_1: Texts
    text_2: Texts


class RerankBody(TextsBody):
    """Body of `POST /v1/rerank`. If the body has `texts` instead of `documents`, the response has the format of
    text-embeddings-inference. For this format, `truncate` shortens texts that are too long, and `raw_scores` requests a
    cross-encoder's logits."""

    query: str
    documents: Texts | None = None
    texts: Texts | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    raw_scores: bool | None = None


@router.post("/v1/score", summary="How close texts are to each other (vLLM)")
@router.post("/score", include_in_schema=False)
async def score(body: ScoreBody, request: Request) -> Response:
    firsts, seconds = body.text_1, body.text_2
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise InvalidRequest(
            f"text_1 has {len(firsts)} texts and text_2 has {len(seconds)}; send as many in both, or one text as "
            "text_1",
            "text_1",
        )
    call = call_of(request.scope)
    scores, name = await run_while_connected(
        request.receive, _scores(body, serving_of(request), list(zip(firsts, seconds, strict=True)))
    )
    rows = [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)]
    told = {"id": f"score-{call.id}", "object": "list", "created": int(time.time()), "model": name}
    return json_response({**told, "data": rows, "usage": _usage(call)})


def _usage(call: RequestContext) -> dict[str, int]:
    return {"prompt_tokens": call.num_prompt, "total_tokens": call.num_prompt}


@router.post("/v1/rerank", summary="Texts in order of how close they are to a query (Jina, Cohere)")
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/rerank", include_in_schema=False)
async def rerank(body: RerankBody, request: Request) -> Response:
    documents = body.documents or body.texts
    if documents is None or (body.documents and body.texts):
        raise InvalidRequest("documents are missing: send the texts to rank", "documents")
    if not body.query:
        raise InvalidRequest("query is empty; it must have at least one character", "query")
    if body.top_n is not None and body.top_n < 1:
        raise InvalidRequest(f"top_n is {body.top_n}; must be at least 1", "top_n")
    call = call_of(request.scope)
    pairs = [(body.query, text) for text in documents]
    scores, name = await run_while_connected(request.receive, _ranks(body, serving_of(request), pairs))
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: body.top_n]
    if body.texts is not None:
        return json_response([_row(i, "score", scores[i], documents[i] if body.return_text else None) for i in order])
    shows = body.return_documents is not False
    results = [_row(i, "relevance_score", scores[i], {"text": documents[i]} if shows else None) for i in order]
    return json_response({"id": f"rerank-{call.id}", "model": name, "usage": _usage(call), "results": results})


def _row(number: int, name: str, value: float, document: Any) -> dict[str, Any]:
    row = {"index": number, name: value}
    return row if document is None else row | {"document" if isinstance(document, dict) else "text": document}


async def _ranks(body: RerankBody, serving: RequestLifecycle, pairs: Sequence[Pair]) -> tuple[list[float], str]:
    if body.truncate and body.truncate_prompt_tokens is None:
        body.truncate_prompt_tokens = pooling_inputs.AS_FITS
    return await _scores(body, serving, pairs, is_raw=bool(body.raw_scores))


async def _scores(
    body: TextsBody, serving: RequestLifecycle, pairs: Sequence[Pair], is_raw: bool = False
) -> tuple[list[float], str]:
    """Return the score of each pair, and the served model name."""
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    how = pooling_inputs.PoolingOptions(truncate=body.truncate_prompt_tokens)
    at_once = await body.hold(serving, len(texts))
    if pooling_inputs.ranks_pairs(serving.model):
        return await _cross_scores(serving, pairs, how, at_once, is_raw)
    vectors: dict[str, array[float]] = {}

    def keep(number: int, vector: array[float]) -> None:
        vectors[texts[number]] = pooling_inputs.shaped(serving.model, vector)

    name = await pooling_inputs.run_vectors(
        serving, await pooling_inputs.read_texts(serving, texts, how), at_once, keep
    )
    # Embeddings have length 1, so their dot product is the cosine.
    return [sum(map(mul, vectors[one], vectors[other])) for one, other in pairs], name


async def _cross_scores(
    serving: RequestLifecycle, pairs: Sequence[Pair], how: pooling_inputs.PoolingOptions, at_once: int, is_raw: bool
) -> tuple[list[float], str]:
    scores = [0.0] * len(pairs)
    activation = "identity" if is_raw else pooling_inputs.activation_of(serving.model)

    def keep(number: int, logits: array[float]) -> None:
        (scores[number],) = pooling_inputs.activated(logits, activation)

    return scores, await pooling_inputs.run_vectors(
        serving, await pooling_inputs.read_texts(serving, pairs, how), at_once, keep
    )
