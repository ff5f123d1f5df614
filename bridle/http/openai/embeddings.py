"""`POST /v1/embeddings`: vectors of texts.

A vector is the hidden state of a text's last token, from which the next token would be drawn, scaled to length 1. Each
text is a request of the engine like any other: its prompt is computed in chunks beside other requests, and its cached
part is not computed again. A call has a few of its texts in the engine at a time.
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

from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.http.fields import Fields
from bridle.http.openai.schemas import PROMPTS_SCHEMA, prompts
from bridle.http.state import serving_of
from bridle.http.transport.call import call_of, run_while_connected
from bridle.http.transport.json_body import BoundedRoute
from bridle.http.transport.long_list import LongListResponse
from bridle.service.generation import Part
from bridle.service.requests import EMBEDDING
from bridle.service.serving import Serving

MAX_INPUTS = 512
#: How many texts of one call are in the engine at once.
MAX_AT_ONCE = 16

router = APIRouter(route_class=BoundedRoute)

Inputs = Annotated[Any, BeforeValidator(lambda value: prompts(value, "input")), WithJsonSchema(PROMPTS_SCHEMA)]


class EmbeddingsBody(Fields):
    """`input` is a text, a list of texts, a list of token ids, or a list of such lists."""

    has_text: ClassVar[bool] = False

    input: Inputs
    model: str | None = None
    adapter: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    priority: int | None = None
    deadline: float | None = None


@router.post("/v1/embeddings", summary="What the model makes of texts, as vectors")
async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
    call = call_of(request.scope)
    rows, name = await run_while_connected(request.receive, _rows(body, serving_of(request)))
    usage = {"prompt_tokens": call.num_prompt, "total_tokens": call.num_prompt}
    call.resources.close()  # a slow reader keeps no place
    return LongListResponse(rows, "data", {"object": "list", "model": name, "usage": usage})


async def _rows(body: EmbeddingsBody, serving: Serving) -> tuple[list[bytes], str]:
    """An entry of the answer for each text, in their order, and the name of what answers."""
    num_inputs = len(body.input)
    if num_inputs > MAX_INPUTS:
        raise InvalidRequest(f"input has {num_inputs} texts; at most {MAX_INPUTS} in one call", "input")
    at_once = min(num_inputs, MAX_AT_ONCE)
    await serving.hold(body.model, body.adapter, num_prompts=at_once, priority=body.priority, deadline=body.deadline)
    tokens = await serving.tokens(body.input)
    generation = await serving.prepare(tokens, EMBEDDING, detokenize=False, embeds=True, at_once=at_once)
    rows = [b""] * num_inputs

    async def sink(part: Part, events: object) -> None:
        vector = part.collector.output.embedding
        if vector is not None and not rows[part.number]:
            _check_dimensions(body.dimensions, len(vector))
            rows[part.number] = _row(part.number, vector, body.encoding_format == "base64")

    await generation.run(sink)
    return rows, generation.served_name


def _check_dimensions(wanted: int | None, size: int) -> None:
    """Refuse vectors of another size. A part of a vector has a meaning only if the model was trained for it, and no
    checkpoint tells whether it was."""
    if wanted is not None and wanted != size:
        raise UnsupportedFeature(
            f"dimensions is {wanted}; this model's vectors have {size}, and no fewer", "dimensions"
        )


def _row(number: int, vector: array[float], is_base64: bool) -> bytes:
    """One entry as JSON. Entries are made one by one, so that a long answer does not hold up other requests."""
    shown = _base64(vector) if is_base64 else vector.tolist()
    return msgspec.json.encode({"object": "embedding", "index": number, "embedding": shown})


def _base64(vector: array[float]) -> str:
    """The vector as base64 of its 32-bit numbers, the lowest byte first."""
    if sys.byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()
