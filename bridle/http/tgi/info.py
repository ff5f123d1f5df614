"""A description of the server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

import bridle
from bridle.http.state import HttpState, borrow, http_state, json_response
from bridle.http.tgi.errors import TgiRoute
from bridle.http.tgi.plan import MAX_BEST_OF, MAX_TOP_TOKENS, max_input_tokens
from bridle.http.tgi.schemas import base_name
from bridle.sampling import MAX_STOP_STRINGS
from bridle.serving import LoadedModel

router = APIRouter(route_class=TgiRoute)


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
