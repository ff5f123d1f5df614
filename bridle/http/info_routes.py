"""Routes that tell about the server: health, metrics, and the page for browsers."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from bridle.http.errors import json_response
from bridle.http.page import render_page
from bridle.http.state import http_state

router = APIRouter()
_PAGE_HEADERS = {
    # Nothing from elsewhere is loaded, and nobody may frame the page.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/health", summary="Whether the engines run")
async def health(request: Request) -> Response:
    http = http_state(request)
    return _state(http.registry.is_healthy, "ok", "an engine has failed" if len(http.registry) else "no model")


@router.get("/ping", summary="The same, where hosted endpoints look for it")
async def ping(request: Request) -> Response:
    return await health(request)


@router.get("/health/live", summary="Whether the process answers")
async def live() -> Response:
    return json_response({"status": "ok"})


@router.get("/health/ready", summary="Whether new requests are taken")
async def ready(request: Request) -> Response:
    http = http_state(request)
    return _state(http.is_ready, "ready", "shutting down" if http.is_draining else "not ready")


@router.get("/metrics", summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    http = http_state(request)
    http.metrics.in_flight.set(http.admission.num_requests)
    return Response(http.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    """A page for browsers; for others, as with text-generation-inference, whether requests are taken."""
    http = http_state(request)
    if "text/html" not in request.headers.get("accept", ""):
        return await ready(request)
    return HTMLResponse(render_page(http.registry, str(request.base_url)), headers=_PAGE_HEADERS)


def _state(is_good: bool, good: str, bad: str) -> Response:
    return json_response({"status": good if is_good else bad}, 200 if is_good else 503)
