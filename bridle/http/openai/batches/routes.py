"""`/v1/batches`: routes that create, list, read and cancel batches."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.http.fields import InnerFields
from bridle.http.middleware.identity import identity_of
from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.openai.batches.runner import ENDPOINTS, BatchRunner
from bridle.http.openai.responses.schemas import Metadata
from bridle.http.openai.responses.stored import page_of
from bridle.http.state import http_state, json_response
from bridle.safe_repr import short_repr
from bridle.serving.outputs.batch_store import Batch

router = APIRouter(route_class=BoundedRoute)


class BatchBody(InnerFields):
    """Body of `POST /v1/batches`: the id of a file of requests, all for one route."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata = None
    output_expires_after: Any = None


@router.post("/v1/batches", summary="Answer a file of requests in the background")
async def create(body: BatchBody, request: Request) -> Response:
    http, sender = http_state(request), identity_of(request)
    http.check_open()
    if body.endpoint not in ENDPOINTS:
        shown = short_repr(body.endpoint)
        raise InvalidRequest(f"endpoint: got {shown}; must be one of {', '.join(ENDPOINTS)}", "endpoint")
    if body.output_expires_after is not None:
        raise UnsupportedFeature(
            "output_expires_after is not supported, because the server keeps all files for the same time; leave it out",
            "output_expires_after",
        )
    file = http.files.find(sender.user, body.input_file_id, "input_file_id")
    if file.purpose != "batch":
        raise InvalidRequest(
            f"input_file_id: got a file with the purpose {file.purpose!r}; must be 'batch'. Upload a file of requests",
            "input_file_id",
        )
    made = http.batches.create(sender, body.endpoint, file.id, body.metadata or {})
    _runner(request).start(made)
    return json_response(made.fields())


@router.get("/v1/batches", summary="The batches of a user")
async def list_batches(request: Request) -> Response:
    batches = http_state(request).batches.of(identity_of(request).user)
    return json_response(page_of([batch.fields() for batch in batches], request.query_params))


@router.get("/v1/batches/{batch_id}", summary="A batch")
async def read(batch_id: str, request: Request) -> Response:
    return json_response(_find(batch_id, request).fields())


@router.post("/v1/batches/{batch_id}/cancel", summary="Cancel a batch")
async def cancel(batch_id: str, request: Request) -> Response:
    return json_response(_runner(request).cancel(_find(batch_id, request)).fields())


def _find(batch_id: str, request: Request) -> Batch:
    return http_state(request).batches.find(identity_of(request).user, batch_id)


def _runner(request: Request) -> BatchRunner:
    runner = request.app.state.batches
    assert isinstance(runner, BatchRunner)
    return runner
