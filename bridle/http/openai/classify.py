"""`POST /v1/classify`: labels each text with a sequence classifier, in vLLM's format."""

from __future__ import annotations

import time
from array import array
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.middleware.request_context import call_of, run_while_connected
from bridle.http.openai.embeddings import Inputs, TextsBody
from bridle.http.state import json_response, serving_of
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
from bridle.serving.requests import pooling_inputs

router = APIRouter(route_class=BoundedRoute)


class ClassifyBody(TextsBody):
    """Body of `POST /v1/classify`. `input` is a text, a list of texts, a list of token ids, or a list of such lists. If
    `use_activation` is false, `probs` in the response are the head's logits."""

    input: Inputs
    use_activation: bool = True


@router.post("/v1/classify", summary="Which labels a classifier gives texts (vLLM)")
@router.post("/classify", include_in_schema=False)
async def classify(body: ClassifyBody, request: Request) -> Response:
    call = call_of(request.scope)
    rows, name = await run_while_connected(request.receive, _rows(body, serving_of(request)))
    told = {"id": f"classify-{call.id}", "object": "list", "created": int(time.time()), "model": name}
    usage = {"prompt_tokens": call.num_prompt, "total_tokens": call.num_prompt, "completion_tokens": 0}
    return json_response({**told, "data": rows, "usage": usage})


async def _rows(body: ClassifyBody, serving: RequestLifecycle) -> tuple[list[dict[str, Any]], str]:
    at_once = await body.hold(serving, len(body.input))
    pooling_inputs.check_classifies(serving.model)
    tokens = await pooling_inputs.read_texts(
        serving, body.input, pooling_inputs.PoolingOptions(truncate=body.truncate_prompt_tokens)
    )
    activation = pooling_inputs.activation_of(serving.model) if body.use_activation else "identity"
    rows: list[dict[str, Any]] = [{}] * len(tokens)

    def keep(number: int, logits: array[float]) -> None:
        probs = pooling_inputs.activated(logits, activation)
        assert serving.model.pooling is not None  # it classifies
        label = serving.model.pooling.labels[max(range(len(probs)), key=probs.__getitem__)]
        rows[number] = {"index": number, "label": label, "probs": probs, "num_classes": len(probs)}

    return rows, await pooling_inputs.run_vectors(serving, tokens, at_once, keep)
