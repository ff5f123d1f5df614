"""`POST /v1/embeddings`: embeddings of texts.

An embedding model pools as the files in its folder say. For a model that generates text, the embedding is the hidden
state of the text's last token. All embeddings are normalized to length 1. Each text is a separate request to the
engine, which batches the texts of all HTTP requests. Only some texts of an HTTP request are in the engine at the same
time.
"""

from __future__ import annotations

import base64
import sys
from array import array
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import BeforeValidator, WithJsonSchema
from starlette.responses import Response

from bridle.errors import InvalidRequest
from bridle.http.chunked_json import ChunkedJsonResponse
from bridle.http.fields import Fields
from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.middleware.request_context import call_of, run_while_connected
from bridle.http.openai.schemas import PROMPTS_SCHEMA, prompts
from bridle.http.state import serving_of
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
from bridle.serving.requests.pooling_inputs import PoolingOptions, check_embeds, read_texts, run_vectors, shaped

MAX_INPUTS = 512
#: The maximum number of texts of one call that are in the engine at the same time.
MAX_AT_ONCE = 16

router = APIRouter(route_class=BoundedRoute)

Inputs = Annotated[Any, BeforeValidator(lambda value: prompts(value, "input")), WithJsonSchema(PROMPTS_SCHEMA)]


class TextsBody(Fields):
    """Common fields of all routes for embeddings, scores or labels of texts. A text of more than
    `truncate_prompt_tokens` tokens is truncated; -1 means the model's limit."""

    has_text: ClassVar[bool] = False
    #: True if a call must name its model when the server has several models.
    must_name: ClassVar[bool] = False

    model: str | None = None
    adapter: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    deadline: float | None = None

    async def hold(self, serving: RequestLifecycle, num_texts: int) -> int:
        """Acquire the model, and admission slots for the texts that are in the engine at the same time. Returns the
        number of slots."""
        if num_texts > MAX_INPUTS:
            raise InvalidRequest(f"input has {num_texts} texts; at most {MAX_INPUTS} in one request", "input")
        at_once = min(num_texts, MAX_AT_ONCE)
        await serving.acquire_model(
            self.model,
            self.adapter,
            num_prompts=at_once,
            priority=self.priority,
            deadline=self.deadline,
            generates=False,
            must_name=self.must_name,
        )
        return at_once


class EmbeddingsBody(TextsBody):
    """Body of `POST /v1/embeddings`. `input` is a text, a list of texts, a list of token ids, or a list of such lists.
    `prompt_name` names a prompt that the model's folder defines."""

    must_name: ClassVar[bool] = True

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    prompt_name: str | None = None


@router.post("/v1/embeddings", summary="Embeddings of texts")
async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
    call = call_of(request.scope)
    rows, name = await run_while_connected(request.receive, _rows(body, serving_of(request)))
    usage = {"prompt_tokens": call.num_prompt, "total_tokens": call.num_prompt}
    call.resources.close()  # a client that reads slowly does not block other requests
    return ChunkedJsonResponse(rows, "data", {"object": "list", "model": name, "usage": usage})


async def _rows(body: EmbeddingsBody, serving: RequestLifecycle) -> tuple[list[bytes], str]:
    """Return a JSON entry for each text, in the order of the texts, and the served model name."""
    at_once = await body.hold(serving, len(body.input))
    check_embeds(serving.model, body.dimensions)
    tokens = await read_texts(serving, body.input, PoolingOptions(body.prompt_name, body.truncate_prompt_tokens))
    rows = [b""] * len(tokens)

    def keep(number: int, vector: array[float]) -> None:
        rows[number] = _row(number, shaped(serving.model, vector, body.dimensions), body.encoding_format == "base64")

    return rows, await run_vectors(serving, tokens, at_once, keep)


def _row(number: int, vector: array[float], is_base64: bool) -> bytes:
    """Encode the JSON entry of one text. Entries are encoded one by one, so that a long response does not delay other
    requests."""
    shown = _base64(vector) if is_base64 else vector.tolist()
    return msgspec.json.encode({"object": "embedding", "index": number, "embedding": shown})


def _base64(vector: array[float]) -> str:
    """Return the vector as base64 of little-endian 32-bit floats."""
    if sys.byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()
