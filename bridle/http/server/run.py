"""Runs a server from its settings: loads the models, listens, drains on the first signal, and ends on the second.

After SIGTERM or SIGINT, the server reports that it is not ready, and refuses new generations. The socket stays open, so
that a load balancer can read that the server is not ready. Running requests may finish within the grace period. After
the grace period, or after a second signal, the server ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from ipaddress import ip_address
from types import FrameType
from typing import TYPE_CHECKING

import structlog
import uvicorn
from fastapi import FastAPI

from bridle import telemetry
from bridle.chat.chat_format import LearningLoader, learn
from bridle.errors import BridleError, InvalidRequest
from bridle.http.app import create_app
from bridle.http.curl_line import curl_line
from bridle.http.server.listening import bind
from bridle.http.server.process_tuning import tune_process
from bridle.http.server.uvicorn_protocol import bounded_protocol
from bridle.http.server.websocket_frontend import SocketFrontMaker
from bridle.http.server.websocket_protocol import bounded_frames
from bridle.http.settings import ServeSettings
from bridle.http.state import HttpState
from bridle.http.writers.pool import WriterPool
from bridle.load_progress import bar
from bridle.logs import configure_logs
from bridle.serving import LoadedModel, ModelRegistry, ModelSet, build_registry
from bridle.serving.lifecycle.request_record import Tracing
from bridle.serving.policies import PolicyRegistry
from bridle.serving.tenancy.keys import KeyStore
from bridle.threads import start_thread

if TYPE_CHECKING:
    from bridle.serving.lifecycle.otel import OtelTracing

_log: structlog.stdlib.BoundLogger = structlog.get_logger("bridle.serve")
_LOCAL = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - what to call it from here, not what to bind
_CLOSE_SECONDS = 2  # to close connections whose requests were cancelled
#: Seconds between the start of listening and the reading of tokenizers that no request has needed yet.
_SETTLE_SECONDS = 1.0

Loader = Callable[[ServeSettings], LoadedModel]
#: Reports the served models and the `HOST:PORT` on which the server listens.
Announce = Callable[[ModelRegistry, str], None]


def serve(
    settings: ServeSettings | None = None,
    load: Loader | None = None,
    fronts: Sequence[SocketFrontMaker] = (),
    announce: Announce | None = None,
) -> None:
    """Load the configured models and serve them until a signal arrives. Blocks; call it from the main thread.

    The port is bound before the models are loaded, so that an invalid port is reported at once. `load` loads a single
    model instead of the configured ones. `fronts` create the applications that answer WebSockets. `announce` reports
    the address. Raises `InvalidRequest` if the address cannot be used, and errors of loading.
    """
    settings = settings or ServeSettings()
    configure_logs(settings.log_format, settings.log_level)
    context = None if settings.tls is None else settings.tls.make_context()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(bind(settings.host, settings.port)))
        check_exposure(listener, settings)
        keys = None if settings.keys is None else stack.enter_context(contextlib.closing(KeyStore(settings.keys)))
        if keys is not None and keys.is_empty:
            _log.warning(
                "the file has no API keys yet: every request will be refused",
                file=str(settings.keys),
                make="bridle keys add",
            )
        tracing = start_tracing(settings.otlp_endpoint)
        if tracing is not None:
            tracing.make_global()
            stack.callback(tracing.close)
        if settings.tools is not None:
            stack.callback(settings.tools.close)
        registry = stack.enter_context(contextlib.closing(load_registry(settings) if load is None else ModelRegistry()))
        if load is not None:
            registry.add(model := load(settings), settings.aliases)
            learn(model)
        run(registry, settings, listener, keys, fronts, announce, tracing, context)


def run(
    registry: ModelRegistry,
    settings: ServeSettings,
    listener: socket.socket,
    keys: KeyStore | None = None,
    fronts: Sequence[SocketFrontMaker] = (),
    announce: Announce | None = None,
    tracing: Tracing | None = None,
    context: ssl.SSLContext | None = None,
) -> None:
    """Serve `registry` on a bound socket until a signal arrives. The models stay open. `context` is the TLS context of
    `settings.tls`."""
    tune_process(settings.max_connections)
    app = create_app(registry, settings.http.answering_to(settings.host), keys, fronts, tracing)
    writers = WriterPool(settings.front_ends - 1)
    app.state.http.add_writers(writers)
    config = uvicorn_config(app, settings, context, writers)

    def on_listening() -> None:
        host, port = listener.getsockname()[:2]
        shown = _LOCAL.get(host, f"[{host}]" if ":" in host else host)
        scheme, needs_key = "http" if context is None else "https", settings.keys is not None
        (announce or partial(_announce, scheme=scheme, needs_key=needs_key))(registry, f"{shown}:{port}")
        start_thread(partial(_prepare_tokenizers, registry), "bridle-tokenizer")

    beside: list[Callable[[], Coroutine[None, None, None]]]
    beside = [] if settings.tls is None or context is None else [partial(settings.tls.keep_fresh, context)]
    app.state.http.awaits_parked = settings.drain_parked == "wait"
    server = DrainingServer(config, app.state.http, settings.grace_period, on_listening, beside)
    beside += [registry.supervisor(settings.restarts, server.fail).run, app.state.batches.run, writers.run]
    server.run(sockets=[listener])
    if server.failure is not None:
        raise server.failure
    _log.info("stopped")


def start_tracing(endpoint: str | None) -> OtelTracing | None:
    """Start to send this process's spans to a collector at `endpoint`, or at the address in OpenTelemetry's environment
    variables. Returns None if no address is set. Child processes send their spans to the same collector."""
    if endpoint is not None:
        os.environ[telemetry.ENDPOINT] = endpoint
    if not telemetry.wants_traces():
        return None
    provider = telemetry.start_traces()
    from bridle.serving.lifecycle.otel import OtelTracing

    return OtelTracing(provider)


def uvicorn_config(
    app: FastAPI, settings: ServeSettings, context: ssl.SSLContext | None = None, writers: WriterPool | None = None
) -> uvicorn.Config:
    """Return the configuration with which uvicorn serves bridle's application. `writers` are the processes that write
    the application's streams."""
    return uvicorn.Config(
        app,
        http=bounded_protocol(
            settings.max_header_bytes,
            settings.max_connections,
            settings.http,
            app.state.refuse,
            app.state.door,
            app.state.http.turns,
            writers,
        ),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # x-forwarded-for must not decide if a client is a trusted proxy
        lifespan="off",
        ws=bounded_frames(app.state.http.turns),
        ws_max_size=settings.max_message_bytes,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        timeout_keep_alive=30,
        ssl_context_factory=None if context is None else lambda *_: context,
    )


def check_exposure(listener: socket.socket, settings: ServeSettings) -> None:
    """Raise `InvalidRequest` if a server without keys would be open to the network, because every client would be an
    admin."""
    host = listener.getsockname()[0]
    if settings.keys is not None or settings.no_auth or ip_address(host.partition("%")[0]).is_loopback:
        return
    raise InvalidRequest(
        f"without API keys the server may listen only on loopback, not on {host}. Create a key with `bridle keys add "
        "USER` and serve with `--keys FILE`, or use `--no-auth` to accept everybody",
        "host",
    )


class DrainingServer(uvicorn.Server):
    """A uvicorn server that finishes running requests before it closes its socket. `on_listening` is called once the
    server accepts connections. The tasks in `beside` run as long as the server. `failure` is the error that ended the
    server, if any."""

    def __init__(
        self,
        config: uvicorn.Config,
        http: HttpState,
        grace_period: float,
        on_listening: Callable[[], None],
        beside: Sequence[Callable[[], Coroutine[None, None, None]]] = (),
    ) -> None:
        super().__init__(config)
        self._on_listening = on_listening
        self._beside = beside
        self.failure: BridleError | None = None
        self._http = http
        self._grace_period = grace_period
        self._drain_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reload_task: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if self._http.policies.path is not None and hasattr(signal, "SIGHUP"):
            self._loop.add_signal_handler(signal.SIGHUP, self._reload_policies)
        tasks = [asyncio.create_task(work()) for work in self._beside]
        try:
            await super().serve(sockets)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def fail(self, error: BridleError) -> None:
        """End the server because of an error after which it can serve no requests."""
        if self.failure is None:
            _log.error("the server ends", error=str(error))
            self.failure, self.should_exit = error, True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_listening()

    def _reload_policies(self) -> None:
        """Read the policy file again in a thread. Running requests keep their policies."""
        self._reload_task = asyncio.create_task(reload_policies(self._http.policies))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal, and end at once on the second."""
        if self._http.is_draining:
            self.force_exit = self.should_exit = True
            return
        self._http.is_draining = True
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        self._http.begin_drain(self._grace_period)
        self._drain_task = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        """Wait until running requests have ended or the grace period is over, then cancel the remaining requests and
        close the models."""
        admission = self._http.admission
        _log.info("draining", in_flight=admission.num_requests, grace_seconds=self._grace_period)
        try:
            async with asyncio.timeout(self._grace_period):
                await self._http.wait_drained()
        except TimeoutError:
            _log.warning("ending requests", in_flight=admission.num_requests)
            await self._http.close_fronts()
            await asyncio.to_thread(self._http.registry.close)
        else:
            await self._http.close_fronts()
        await asyncio.to_thread(self._http.save)
        self.should_exit = True


async def reload_policies(book: PolicyRegistry) -> None:
    """Read the policy file again. An error is logged, and the current policies stay in force."""
    try:
        current = await asyncio.to_thread(book.reload)
    except InvalidRequest as error:
        _log.error("policies not reloaded", error=str(error))
    else:
        _log.info("policies reloaded", policies=[policy.label for policy in current.policies])


def load_registry(settings: ServeSettings) -> ModelRegistry:
    """Create the registry, and load all configured models."""
    models = settings.models or ModelSet((settings.model.model,))
    if settings.control.trace is not None and models.may_be_several:
        raise InvalidRequest(
            "aici_trace records the control runtime of one model; serve only one model with it", "aici_trace"
        )
    loader = LearningLoader(settings.make_loader(settings.engine, settings.control))
    registry, load_named = build_registry(models, settings.model, loader, settings.name, settings.adapters)
    with contextlib.ExitStack() as undo:
        undo.callback(registry.close)
        for alias in settings.aliases:
            registry.add_alias(alias, registry.slot_of(None).name)
        load_named() if settings.log_level == "error" or settings.log_format == "json" else load_named(bar)
        undo.pop_all()
    return registry


def _prepare_tokenizers(registry: ModelRegistry) -> None:
    """Load the rest of each tokenizer of which only the vocabulary is loaded, so that no request waits for this."""
    time.sleep(_SETTLE_SECONDS)
    for model in registry:
        model.tokenizer.prepare()


def _announce(registry: ModelRegistry, address: str, scheme: str, needs_key: bool) -> None:
    """Print the address and an example command on standard output."""
    url = f"{scheme}://{address}/"
    sys.stdout.write(
        f"Serving {', '.join(registry.names) or 'models that requests name'} at {url} (stop with Ctrl+C)\n\n"
    )
    sys.stdout.write(f"  {curl_line(registry, url, needs_key)}\n\n")
    sys.stdout.flush()
