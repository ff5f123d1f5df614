"""A real server whose executor fails in a way that the test chooses: its thread dies, its device fails, or a step
hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx

from bridle.backends import load_executor
from bridle.config import EngineConfig, ModelConfig
from bridle.controller_tools import ToolExecutor
from bridle.errors import BridleError
from bridle.http import HttpSettings, ServeSettings, create_app
from bridle.http.server.listening import bind
from bridle.http.server.run import DrainingServer, uvicorn_config
from bridle.http.server.websocket_frontend import SocketFrontMaker
from bridle.load_progress import Report
from bridle.serving import ModelSet, build_registry
from bridle.serving.models.engine_supervisor import RestartPolicy
from bridle.serving.models.served_models import EngineLoader
from tests.waiting import PATIENCE, until

BODY = {"prompt": "Once upon a time", "max_tokens": 6, "temperature": 0}


class WatchedTools(ToolExecutor):
    """Tools that report which watchers they have."""

    def __init__(self) -> None:
        super().__init__()
        self.watching: set[Callable[[], None]] = set()

    def watch(self, on_done: Callable[[], None]) -> None:
        self.watching.add(on_done)
        super().watch(on_done)

    def unwatch(self, on_done: Callable[[], None]) -> None:
        self.watching.discard(on_done)
        super().unwatch(on_done)


class FaultyServer:
    """A server of the demo model with supervision. `fault` is called in each forward pass of each engine. `on_load` is
    called before each load except the first."""

    def __init__(self, policy: RestartPolicy, engine: EngineConfig, fronts: tuple[SocketFrontMaker, ...] = ()) -> None:
        self.fault: Callable[[], object] = lambda: None
        self.on_load: Callable[[], object] = lambda: None
        self.num_loads = 0
        self.tools = WatchedTools()
        loader = EngineLoader(engine, executors=self._load, tools=self.tools)
        model = ModelConfig("demo", kv_memory=8 << 20, warm_up=False)
        self.registry, load = build_registry(ModelSet(("demo",)), model, loader)
        load()
        settings, listener = ServeSettings(model=model), bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = create_app(self.registry, HttpSettings(load_timeout=PATIENCE), None, fronts)
        beside: list[Any] = []
        is_up = threading.Event()
        self.server = DrainingServer(uvicorn_config(app, settings, None), app.state.http, 1.0, is_up.set, beside)
        beside.append(self.registry.supervisor(policy, self.server.fail).run)
        self.thread = threading.Thread(target=self._run, args=(listener,), daemon=True)
        self.thread.start()
        assert is_up.wait(PATIENCE)

    def _load(self, config: ModelConfig, progress: Report | None, sampler: Any) -> Any:
        if self.num_loads:
            self.on_load()
        self.num_loads += 1
        executor = load_executor(config, progress, sampler)
        forward = executor.forward

        def failing(plan: Any) -> None:
            self.fault()
            forward(plan)

        executor.forward = failing  # type: ignore[method-assign]
        return executor

    def _run(self, listener: Any) -> None:
        with closing(self.registry):
            self.server.run(sockets=[listener])

    @property
    def failure(self) -> BridleError | None:
        return self.server.failure

    def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=BODY | fields, timeout=PATIENCE)

    def health(self) -> httpx.Response:
        return httpx.get(self.url + "/health", timeout=PATIENCE)

    def until_healthy(self) -> None:
        until(lambda: self.health().status_code == 200, "that the server is healthy")

    def end(self) -> None:
        self.server.force_exit = self.server.should_exit = True
        self.thread.join(PATIENCE)
        self.tools.close()


@contextmanager
def faulty_server(
    policy: RestartPolicy | None = None,
    engine: EngineConfig | None = None,
    fronts: tuple[SocketFrontMaker, ...] = (),
) -> Iterator[FaultyServer]:
    server = FaultyServer(policy or RestartPolicy(), engine or EngineConfig(), fronts)
    try:
        yield server
    finally:
        server.end()


def once(act: Callable[[], object]) -> Callable[[], None]:
    """Return a fault that happens in only one forward pass."""
    left = [act]

    def fault() -> None:
        if left:
            left.pop()()

    return fault


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act
