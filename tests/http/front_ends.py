"""A server with several front-end processes, in a thread over a scripted model."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bridle.http import HttpSettings, ServeSettings, create_app
from bridle.http.server.listening import bind
from bridle.http.server.run import DrainingServer, uvicorn_config
from bridle.http.state import HttpState
from bridle.http.writers.pool import PING_SECONDS, WriterPool
from bridle.serving import LoadedModel, ModelRegistry
from tests.waiting import PATIENCE, until


class FrontEnds:
    """The server. `pool` has the server's front-end processes, and `http` has the server's state."""

    def __init__(self, model: LoadedModel, front_ends: int, ping_seconds: float, settings: HttpSettings) -> None:
        self.pool = WriterPool(front_ends - 1, ping_seconds)
        self.registry = ModelRegistry([model])
        app = create_app(self.registry, settings)
        self.http: HttpState = app.state.http
        self.http.add_writers(self.pool)
        config = uvicorn_config(app, ServeSettings(http=settings), None, self.pool)
        listener, is_up = bind("127.0.0.1", 0), threading.Event()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 10)  # of each connection: what waits, waits here
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = DrainingServer(config, self.http, 1.0, is_up.set, [self.pool.run])
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)
        self.thread.start()
        assert is_up.wait(PATIENCE)
        self.until_up()

    def until_up(self) -> None:
        until(lambda: all(writer.is_up for writer in self.pool.writers), "that all front ends are up")

    def until_quiet(self) -> None:
        """Wait until no request runs, and no front end has a connection."""
        until(lambda: not self.http.admission.num_requests, "that no request runs")
        writers = self.pool.writers
        until(lambda: not any(writer.num_connections for writer in writers), "that all connections are closed")


@contextmanager
def front_ended(
    model: LoadedModel, front_ends: int = 2, ping_seconds: float = PING_SECONDS, **settings: Any
) -> Iterator[FrontEnds]:
    server = FrontEnds(model, front_ends, ping_seconds, HttpSettings(**settings))
    try:
        yield server
    finally:
        server.server.should_exit = True
        server.thread.join(PATIENCE)
        server.registry.close()
        assert not server.thread.is_alive()
