"""Routes that generate nothing: a description of the server, and how text becomes tokens."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

import bridle
from bridle.chat.conversation import prompt_text
from bridle.errors import InvalidRequest
from bridle.http.errors import json_response
from bridle.http.openai.schemas import ChatBody
from bridle.http.state import HttpState, borrow, http_state
from bridle.http.tgi.errors import NativeRoute
from bridle.http.tgi.plan import MAX_BEST_OF, MAX_TOP_TOKENS, max_input_tokens
from bridle.http.tgi.schemas import TokenizeBody, base_name
from bridle.http.transport.long_list import LongListResponse
from bridle.sampling import MAX_STOP_STRINGS
from bridle.service import LoadedModel, check_text
from bridle.text import Tokenizer

_ROWS_PER_PIECE = 4_096

router = APIRouter(route_class=NativeRoute)


@router.get("/info", summary="What is served, and its limits (text-generation-inference)")
async def info(request: Request, model: str | None = None) -> Response:
    return json_response(_info(http_state(request), await borrow(request, base_name(model))))


@router.post("/tokenize", summary="The tokens of a text, with their places in it")
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    model = await borrow(request, body.model)
    add_special = True if body.add_special_tokens is None else body.add_special_tokens
    return LongListResponse(await _tokens(model, body.inputs, add_special))


@router.post("/chat_tokenize", summary="The prompt of a conversation, and its tokens")
async def chat_tokenize(body: ChatBody, request: Request) -> Response:
    model = await borrow(request, base_name(body.model))
    text = await model.in_text_thread(prompt_text, model, body.conversation())
    tokens = await _tokens(model, text, add_special_tokens=False)
    return LongListResponse(tokens, "tokenize_response", {"templated_text": text})


async def _tokens(model: LoadedModel, text: str, add_special_tokens: bool) -> list[bytes]:
    """JSON of the tokens, some thousands at a time."""
    if not text:
        raise InvalidRequest("inputs is empty; it must have at least one character", "inputs")
    check_text(model, text, "inputs")
    return await model.in_text_thread(_rows, model.tokenizer, text, add_special_tokens)


def _rows(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[bytes]:
    """The JSON rows of a text's tokens. There may be hundreds of thousands, so other tasks run between pieces."""
    rows = tokenizer.encode_with_offsets(text, add_special_tokens)
    pieces = (
        [
            {"id": token, "text": text[start:stop] or tokenizer.token_text(token), "start": start, "stop": stop}
            for token, start, stop in rows[at : at + _ROWS_PER_PIECE]
        ]
        for at in range(0, len(rows), _ROWS_PER_PIECE)
    )
    return [msgspec.json.encode(piece)[1:-1] for piece in pieces]


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
        "adapters": [adapter.name for adapter in model.adapters.list()],
        "router": "bridle",
        "version": bridle.__version__,
        "sha": None,
        "docker_label": None,
    }
