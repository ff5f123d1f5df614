"""The state that the routes of one application share."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from fastapi import Request

from bridle.errors import EngineClosed
from bridle.heap import return_free_memory
from bridle.http.metrics.metrics import Metrics
from bridle.http.settings import HttpSettings
from bridle.http.transport.sockets import SocketFront
from bridle.service import Admission, ModelRegistry
from bridle.service.story import Story, Tracing
from bridle.service.turns import Turns

_CROWD = 16  # after this many requests in flight the heap is worth trimming


@dataclass(slots=True)
class HttpState:
    """Models, limits and counters of an application, and the `fronts` at its WebSockets; `started` is a Unix time in
    seconds.

    `live` are the requests that a model works on, by id. While it `is_draining`, new generations are turned away;
    `idle` is set once the running ones are over. Large bodies are parsed one at a time, under `parsing`: parsers that
    take turns would keep everybody else from running. `turns` bound what clients cost that are told no, or say nothing;
    `num_crowd` is the most that was in flight since nothing was.
    """

    registry: ModelRegistry
    settings: HttpSettings
    admission: Admission
    metrics: Metrics
    is_draining: bool = False
    num_uploads: int = 0
    fronts: list[SocketFront] = field(default_factory=list)
    live: dict[str, Story] = field(default_factory=dict)
    tracing: Tracing | None = None
    started: int = field(default_factory=lambda: int(time.time()))
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    parsing: asyncio.Lock = field(default_factory=asyncio.Lock)
    turns: Turns = field(default_factory=Turns)
    num_crowd: int = 0

    @property
    def is_ready(self) -> bool:
        return self.registry.is_healthy and not self.is_draining

    def begin_drain(self, seconds: float = 0.0) -> None:
        """Accept no new generations from now on; running ones have `seconds` to finish."""
        self.is_draining = True
        for front in self.fronts:
            front.drain(seconds)
        self.note_end()

    async def close_fronts(self) -> None:
        """End the connections of all WebSocket front-ends."""
        for front in self.fronts:
            await front.close()

    def note_end(self) -> None:
        """Note that a call is over, and that what it had reserved is free again. After a crowd of calls, once all are
        over, unused memory of the heap goes back to the system."""
        self.num_crowd = max(self.num_crowd, self.admission.num_requests)
        if self.admission.num_requests == 0 and self.num_crowd >= _CROWD:
            self.num_crowd = 0
            asyncio.get_running_loop().run_in_executor(None, return_free_memory)
        if self.is_draining and self.admission.num_requests == 0:
            self.idle.set()

    def check_open(self) -> None:
        """Raises `EngineClosed` while the server is shutting down."""
        if self.is_draining:
            raise EngineClosed("the server is shutting down and takes no new requests")


def http_state(request: Request) -> HttpState:
    """The state of the application that a request came to."""
    state = request.app.state.http
    assert isinstance(state, HttpState)
    return state
