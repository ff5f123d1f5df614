"""`GET /v1/traces/{request_id}`: how the tokens of a request came to be, for who asked for it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.http.middleware.identity import identity_of
from bridle.http.state import http_state

router = APIRouter()


@router.get("/v1/traces/{request_id}", summary="How the tokens of a request came to be")
async def trace(request_id: str, request: Request) -> Response:
    """JSON lines; the id is that of the answer's `x-request-id`. Traces are kept for some minutes."""
    text = await http_state(request).traces.find(request_id, identity_of(request).user)
    return Response(text, media_type="application/x-ndjson")
