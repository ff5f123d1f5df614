"""`POST /v1/embeddings`: vectors of texts.

A vector is the hidden state of a text's last token, from which the next token would be drawn, scaled to length 1. Each
text is a request of the engine like any other: its prompt is computed in chunks beside other requests, and its cached
part is not computed again. A call has a few of its texts in the engine at a time.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema
from starlette.responses import Response

from bridle.engine.request import Request as EngineRequest
from bridle.errors import EngineClosed, InvalidRequest, UnsupportedFeature
from bridle.http.generation import reserve, tokens_of
from bridle.http.models import Served, hold
from bridle.http.openai.schemas import PROMPTS_SCHEMA, prompts
from bridle.http.state import HttpState, http_state
from bridle.http.terms import take_terms
from bridle.http.transport.call import Call, call_of
from bridle.http.transport.identity import identity_of
from bridle.http.transport.json_body import BoundedRoute
from bridle.http.transport.long_list import LongListResponse
from bridle.http.transport.sse import run_while_connected
from bridle.outputs import Event, Finished, Usage
from bridle.service import OutputCollector, Ticket, raise_first_error
from bridle.service.requests import embedding_request

if TYPE_CHECKING:
    from bridle.engine.client import EngineClient

MAX_INPUTS = 512
#: How many texts of one call are in the engine at once.
MAX_AT_ONCE = 16

router = APIRouter(route_class=BoundedRoute)

Inputs = Annotated[Any, BeforeValidator(lambda value: prompts(value, "input")), WithJsonSchema(PROMPTS_SCHEMA)]


class EmbeddingsBody(BaseModel):
    """`input` is a text, a list of texts, a list of token ids, or a list of such lists."""

    model_config = ConfigDict(strict=True)

    input: Inputs
    model: str | None = None
    adapter: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    priority: int | None = None
    deadline: float | None = None


@router.post("/v1/embeddings", summary="What the model makes of texts, as vectors")
async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
    http, call = http_state(request), call_of(request.scope)
    take_terms(body, request)
    served = await hold(request, body.model, body.adapter)
    num_inputs = len(body.input)
    if num_inputs > MAX_INPUTS:
        raise InvalidRequest(f"input has {num_inputs} texts; at most {MAX_INPUTS} in one call", "input")
    ticket = reserve(http, call, served.model, min(num_inputs, MAX_AT_ONCE), 1)
    requests = await _requests(body, request, http, served, ticket)
    call.submit(requests[0], sum(len(one.prompt) for one in requests))
    rows = await run_while_connected(request.receive, _run(served.model.client, call, requests, body))
    usage = {"prompt_tokens": call.num_prompt, "total_tokens": call.num_prompt}
    name = served.adapter or served.model.name
    call.resources.close()  # a slow reader keeps no place
    return LongListResponse(rows, "data", {"object": "list", "model": name, "usage": usage})


async def _requests(
    body: EmbeddingsBody, request: Request, http: HttpState, served: Served, ticket: Ticket
) -> list[EngineRequest]:
    """The engine requests of all texts. All are checked before any runs."""
    call, user = call_of(request.scope), identity_of(request).user
    found = []
    for number, tokens in enumerate(await tokens_of(served.model, call, body.input)):
        made = embedding_request(
            served.model,
            tokens,
            request_id=f"{call.id}-{number}",
            adapter=served.adapter,
            timeout=http.settings.request_timeout,
            tenant=user,
            terms=call.terms,
            metadata=call.metadata,
        )
        found.append(ticket.seat(made))
        await asyncio.sleep(0)  # lets other requests run between many texts
    return found


async def _run(
    client: EngineClient, call: Call, requests: Sequence[EngineRequest], body: EmbeddingsBody
) -> list[bytes]:
    """The entries of the answer, in the order of the requests; a few requests run at once."""
    rows = [b""] * len(requests)
    numbered = iter(enumerate(requests))
    usage = Usage()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(len(requests), MAX_AT_ONCE)):
                group.create_task(_work(client, call, numbered, body, rows, usage))
    except BaseExceptionGroup as failed:  # the first says what is wrong; the others were cancelled
        raise failed.exceptions[0] from None
    finally:
        call.usage, call.finish = usage, ["stop"] if all(rows) else ["cancelled"]
    return rows


async def _work(
    client: EngineClient,
    call: Call,
    numbered: Iterator[tuple[int, EngineRequest]],
    body: EmbeddingsBody,
    rows: list[bytes],
    usage: Usage,
) -> None:
    for number, request in numbered:
        collector = OutputCollector(request)
        async with client.submit(request) as stream:
            async for events in stream:
                collector.add(events)
                call.note(events)
                _add_usage(usage, events)
                raise_first_error(collector.output)
        vector = collector.output.embedding
        if vector is None:
            raise EngineClosed("the request was cancelled by the server")
        _check_dimensions(body.dimensions, len(vector))
        rows[number] = _row(number, vector, body.encoding_format == "base64")


def _add_usage(usage: Usage, events: Iterable[Event]) -> None:
    for event in events:
        if isinstance(event, Finished):
            usage.add(event.usage)


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
