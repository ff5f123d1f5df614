"""Creates the ASGI application: routes, errors and limits for a registry of models. A new API adds its router to
`ROUTERS`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute

import bridle
from bridle.http import (
    admin,
    anthropic,
    info_routes,
    ollama,
    openai,
    playground,
    prompt_caches,
    request_routes,
    tgi,
    tool_routes,
)
from bridle.http.aici import routes as aici
from bridle.http.anthropic.routes import CAP_HEADER
from bridle.http.api_route import refusing_for
from bridle.http.errors import ERROR_SCHEMA, Refuse, described, install_error_handlers
from bridle.http.metrics.metrics import Metrics
from bridle.http.middleware.identity import Identifier
from bridle.http.middleware.request_context import POLICIES_HEADER, CallMiddleware
from bridle.http.middleware.trusted_hosts import AllowedHosts
from bridle.http.openai.batches.runner import BatchRunner
from bridle.http.openai.responses.socket import ResponsesSockets
from bridle.http.server.early_reject import EarlyRejector
from bridle.http.server.websocket_frontend import SocketFrontMaker, mount
from bridle.http.settings import HttpSettings
from bridle.http.state import HttpState
from bridle.serving import Admission, ModelRegistry
from bridle.serving.lifecycle.request_record import Tracing
from bridle.serving.outputs import batch_store, conversation_store, file_store
from bridle.serving.outputs.batch_store import Batch, BatchStore
from bridle.serving.outputs.conversation_store import ConversationStore
from bridle.serving.outputs.file_store import FileStore
from bridle.serving.outputs.response_store import SAVED_BOUNDS, ResponseStore
from bridle.serving.policies import PolicyRegistry
from bridle.serving.prompt_caches import PromptCaches
from bridle.serving.state_db import StateDb
from bridle.serving.tenancy.keys import Identity, KeyStore
from bridle.serving.tracing.trace_store import TraceStore

ROUTERS = (
    *openai.routers,
    aici.router,
    info_routes.router,
    *admin.routers,
    *tgi.routers,
    anthropic.router,
    *ollama.routers,
    request_routes.router,
    tool_routes.router,
    prompt_caches.router,
    playground.router,
)


def create_app(
    registry: ModelRegistry,
    settings: HttpSettings | None = None,
    keys: KeyStore | None = None,
    fronts: Iterable[SocketFrontMaker] = (),
    tracing: Tracing | None = None,
) -> FastAPI:
    """Return an ASGI application that serves the models in `registry`. The application neither loads nor closes models.

    If `keys` is given, every route except the health checks requires an API key. `fronts` create further applications,
    which answer WebSockets. `tracing` receives the spans of requests.

        app = create_app(ModelRegistry([load_model(ModelConfig("demo"))]))
    """
    state = _state_of(registry, settings or HttpSettings(), keys, tracing)
    app = FastAPI(
        title="bridle",
        version=bridle.__version__,
        description="Steerable language models.",
        docs_url=None,  # FastAPI's own pages load their scripts from the web
        redoc_url=None,
    )
    app.state.http = state
    sender_of = partial(_sender_of, keys, bool(state.settings.trusted_proxies))
    app.state.batches = BatchRunner(app, state.files, state.batches, sender_of, lambda: state.is_draining)
    refuse = refusing_for((*tgi.routers, anthropic.router, *ollama.routers))
    install_error_handlers(app, refuse)
    hosts = None if state.settings.allowed_hosts is None else AllowedHosts(state.settings.allowed_hosts)
    identify = Identifier(keys, state.settings.trusted_proxies, hosts, state.tickets)
    app.state.refuse = refuse  # for errors before a request reaches the application
    app.state.door = EarlyRejector(state, identify, refuse, info_routes.probe)
    app.router.routes.extend(_routes())
    for make in (ResponsesSockets, *fronts):
        mount(app, state, make)
    _add_middleware(app, state, identify, refuse)
    return app


@cache
def _routes() -> list[BaseRoute]:
    """Return the routes of all APIs, which all applications share. FastAPI needs 20 ms to analyze the routes."""
    whole = APIRouter()
    for router in ROUTERS:
        whole.include_router(router, responses=described(getattr(router.route_class, "schema", ERROR_SCHEMA)))
    return whole.routes


def _state_of(
    registry: ModelRegistry, settings: HttpSettings, keys: KeyStore | None, tracing: Tracing | None
) -> HttpState:
    """Return the state that all routes share."""
    policies = settings.policies or PolicyRegistry()
    db = None if settings.state_db is None else StateDb(settings.state_db)
    traces = TraceStore(settings.trace_folder, settings.trace_share, table=None if db is None else db.table("traces"))
    return HttpState(
        registry,
        _admission(settings, keys),
        tracing,
        settings.max_prompts,
        settings.max_choices,
        default_max_tokens=settings.default_max_tokens,
        settings=settings,
        classes=settings.controller_classes,
        metrics=Metrics(registry, policies, traces),
        policies=policies,
        traces=traces,
        state_db=db,
        **({} if db is None else _saved(db)),
    )


def _saved(db: StateDb) -> dict[str, Any]:
    """Return the parts of the state that are saved in the database file."""
    return {
        "responses": ResponseStore(SAVED_BOUNDS, table=db.table("responses")),
        "conversations": ConversationStore(conversation_store.SAVED_BOUNDS, table=db.table("conversations")),
        "files": FileStore(file_store.SAVED_BOUNDS, table=db.table("files")),
        "batches": BatchStore(batch_store.SAVED_BOUNDS, table=db.table("batches"), answers=db.table("batch_answers")),
        "prompt_caches": PromptCaches(table=db.table("prompt_caches")),
    }


def _sender_of(keys: KeyStore | None, has_proxies: bool, batch: Batch) -> Identity | None:
    """Return the user that created a batch, with the user's current rights; None if the user's key was removed."""
    found = None if keys is None else keys.of_user(batch.user)
    if found is None and (keys is None or has_proxies):
        return Identity(batch.user, batch.is_admin and keys is None)
    return found


def _add_middleware(app: FastAPI, state: HttpState, identify: Identifier, refuse: Refuse) -> None:
    """Add middleware for request records, identification of the sender, and CORS. The middleware that is added last
    sees a request first. CORS preflights have no key, so they are answered before the identification. Browsers may read
    every response."""
    settings = state.settings
    app.add_middleware(CallMiddleware, on_end=state.end, identify=identify, tracing=state.tracing, refuse=refuse)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", POLICIES_HEADER.decode(), CAP_HEADER],
        )


def _admission(settings: HttpSettings, keys: KeyStore | None) -> Admission:
    """Return the admission control for the limits in the settings."""
    is_shared = keys is not None or bool(settings.trusted_proxies)
    return Admission(settings.max_requests, settings.max_prompt_tokens, is_shared=is_shared)
