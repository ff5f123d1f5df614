"""Routes about the server: health, metrics, and the page for browsers."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from bridle import __version__
from bridle.http import playground
from bridle.http.state import HttpState, http_state, json_response

router = APIRouter()
#: The API's description as a page on which a user reads and tries routes.
_DOCS = files("bridle.http").joinpath("docs.html").read_text(encoding="utf-8")
_PAGE_HEADERS = {
    # The page loads nothing from other sites, and no other site may frame it.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
}


def probe(http: HttpState, path: str) -> Response | None:
    """Return the response to a health check; None if the path is no health check's path."""
    ask = _PROBES.get(path)
    return None if ask is None else ask(http)


def _healthy(http: HttpState) -> Response:
    if given_up := http.registry.given_up:
        return _state(False, "ok", f"the engine of {', '.join(given_up)} failed too often")
    if http.registry.restarting:
        return _state(False, "ok", f"restarting the engine of {', '.join(http.registry.restarting)}")
    return _state(http.registry.is_healthy, "ok", "an engine has failed" if len(http.registry) else "no model")


def _live(http: HttpState) -> Response:
    return json_response({"status": "ok"})


def _ready(http: HttpState) -> Response:
    return _state(http.is_ready, "ready", "shutting down" if http.is_draining else "not ready")


_PROBES: dict[str, Callable[[HttpState], Response]] = {
    "/health": _healthy,
    "/ping": _healthy,
    "/health/live": _live,
    "/health/ready": _ready,
}


@router.get("/health", summary="Whether the engines run")
async def health(request: Request) -> Response:
    return _healthy(http_state(request))


@router.get("/ping", summary="Whether the engines run (path of hosted endpoints)")
async def ping(request: Request) -> Response:
    return _healthy(http_state(request))


@router.get("/health/live", summary="Whether the process answers")
async def live(request: Request) -> Response:
    return _live(http_state(request))


@router.get("/health/ready", summary="Whether new requests are taken")
async def ready(request: Request) -> Response:
    return _ready(http_state(request))


@router.get("/version", summary="The version of this server (vLLM)")
async def version(request: Request) -> Response:
    return json_response({"version": __version__})


@router.get("/metrics", summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    http = http_state(request)
    http.metrics.in_flight.set(http.admission.num_requests)
    return Response(http.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    """Return the page for browsers. Clients other than browsers get the server's readiness, as in
    text-generation-inference."""
    http = http_state(request)
    if "text/html" not in request.headers.get("accept", ""):
        return _ready(http)
    return playground.answer(request, playground.PAGE)


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """Return the description of the API as a page for browsers."""
    return HTMLResponse(_DOCS, headers=_PAGE_HEADERS)


def _state(is_good: bool, good: str, bad: str) -> Response:
    return json_response({"status": good if is_good else bad}, 200 if is_good else 503)
