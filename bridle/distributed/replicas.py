"""One `EngineClient` for several replicas, which are engines in other processes. A request goes to the replica that has
computed the prompt's prefix. If that replica is lost, another replica continues the request.

This process stores the tokens that a client has received, so that another replica continues exactly after them. A plain
output is continued from its tokens. Outputs that are not plain are regenerated from their seed; no token is sent twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from bridle import errors
from bridle.config import EngineConfig
from bridle.controller_tools import ToolExecutor
from bridle.distributed import replica_messages as m
from bridle.distributed.adapter_messages import AdapterFetched
from bridle.distributed.codec.errors import unpack_error
from bridle.distributed.live_request import MAX_LOSSES, RoutedRequest
from bridle.distributed.prefix_router import AWAY, RUNNING_TOKENS, PrefixRouter, Router
from bridle.distributed.remote_executor import is_same_model
from bridle.distributed.replica_adapters import ReplicatedLoRAStore
from bridle.distributed.replica_link import MakeLink, ReplicaConnection, ReplicaLink
from bridle.distributed.replica_tools import ReplicaCalls
from bridle.distributed.replica_vectors import ReplicatedVectors
from bridle.distributed.session_affinity import SessionAffinity
from bridle.distributed.tool_messages import ToolAsked, ToolGivenUp
from bridle.engine.active_requests import vector_names
from bridle.engine.async_engine import wake_all
from bridle.engine.client import EventStream
from bridle.engine.input_processor import InputProcessor
from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.request import Request
from bridle.engine.statistics import EngineStatistics
from bridle.outputs import Event, Finished, FinishReason, PromptEvent

_log = logging.getLogger(__name__)


class ReplicaSet:
    """An `EngineClient` over replicas at unix sockets. `start` waits for the first replicas.

    `on_loss(number, pid)` is called when a replica is lost, and may end its process. `on_proven(number, pid)` is called
    after a replica's first result. `make_router(num_replicas, block_size)` creates the object that chooses replicas,
    `make_link` creates the connections, and `clock` gives the time for deadlines. `tools` runs the calls of
    controllers; its creator must close it.
    """

    def __init__(
        self,
        paths: Iterable[str],
        *,
        on_loss: Callable[[int, int], None] = lambda number, pid: None,
        on_proven: Callable[[int, int], None] = lambda number, pid: None,
        make_router: Callable[[int, int], Router] = PrefixRouter,
        make_link: MakeLink = ReplicaLink,
        clock: Callable[[], float] = time.monotonic,
        tools: ToolExecutor | None = None,
    ) -> None:
        self._lock = threading.RLock()
        self.calls = ReplicaCalls(tools or ToolExecutor(), self._send, self._lock)
        self.adapters = ReplicatedLoRAStore(self._send)
        self.control_vectors: ReplicatedVectors | None = None  # None if the replicas do not support control vectors
        self._clock = clock
        self._links: list[ReplicaConnection] = [
            make_link(number, path, self, _with_number(on_loss, number), partial(on_proven, number))
            for number, path in enumerate(paths)
        ]
        self._make_router = make_router
        self._router: Router | None = None
        self.homes: SessionAffinity | None = None
        self._up: dict[int, m.Heartbeat | None] = {}  # the connected replicas, with their last heartbeats
        self.loads = [AWAY] * len(self._links)
        self._live: dict[str, RoutedRequest] = {}
        self._hello: m.Handshake | None = None
        self._intake: InputProcessor | None = None
        self.changed = threading.Condition(self._lock)
        self._is_closed = False
        self.num_losses = 0

    # -- for clients, any thread -----------------------------------------------------------------------------

    def start(self, num_needed: int, timeout: float, is_starting: Callable[[], bool] = lambda: True) -> ReplicaSet:
        """Wait for `num_needed` replicas. Raises `ShardUnavailable` if the replicas do not connect in time."""
        for link in self._links:
            link.start()
        remaining = timeout
        with self.changed:
            while len(self._up) < num_needed:
                if not is_starting() or remaining <= 0:
                    raise errors.ShardUnavailable(
                        f"only {len(self._up)} of {num_needed} replicas started within {timeout:g} s"
                    )
                self.changed.wait(0.1)
                remaining -= 0.1
        return self

    @property
    def info(self) -> ExecutorInfo:
        assert self._hello is not None, "not started"
        return self._hello.info

    @property
    def is_healthy(self) -> bool:
        """Return whether at least one replica is connected. A replica whose engine is not running is disconnected."""
        return bool(self._up)

    @property
    def num_up(self) -> int:
        return len(self._up)

    def submit(self, request: Request) -> EventStream:
        """Start a request on the replica that has the longest part of the prompt's prefix. If no replica is connected,
        the request waits."""
        assert self._intake is not None, "not started"
        assert self._hello is not None
        self._intake.check(request)
        m.pack_request(request)  # refuse at once what cannot be sent
        live = RoutedRequest(request, EventStream(request.id, self.cancel))
        with self._lock:
            if self._is_closed:
                raise errors.EngineClosed("the replicas are closed and accept no requests")
            if request.id in self._live:
                raise errors.InvalidRequest(
                    f"a request with id {request.id!r} is running already; choose another id", "id"
                )
            num_running = max(len(self._up), 1) * self.info.max_num_seqs
            if len(self._live) >= num_running + self._hello.max_waiting:
                raise errors.Overloaded(f"{len(self._live)} requests run or wait already, which is the limit")
            if self.control_vectors is not None:
                live.vectors = self.control_vectors.open(vector_names(request.sampling)).values()
            self._live[request.id] = live
            self._place(live)
        return live.stream

    def cancel(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""
        with self._lock:
            live = self._live.get(request_id)
            if live is None:
                return
            live.is_cancelled = True
            if live.replica is None:
                self._end(live, FinishReason.CANCELLED, None)
            else:
                self._links[live.replica].send(m.CancelRequest(request_id))

    def release_retained_kv(self, request_id: str) -> None:
        """Release the KV that is retained for a finished request; unknown ids are ignored."""
        with self._lock:
            number = None if self.homes is None else self.homes.release(request_id)
            for each in self._up if number is None else {number} & self._up.keys():
                self._links[each].send(m.Unpark(request_id))

    def statistics(self) -> EngineStatistics:
        """Return the sums of the replicas' statistics, from their last heartbeats."""
        total = EngineStatistics()
        for beat in list(self._up.values()):
            if beat is not None:
                m.add_beat(total, beat)
        return total

    def close(self, drain: float = 0.0) -> None:
        """Disconnect from the replicas. Streams that have not ended get `EngineClosed`. Idempotent."""
        with self.changed:
            self.changed.wait_for(lambda: not self._live, drain)
            self._is_closed = True
            self.adapters.close()
            broken = [live.stream for live in self._live.values()]
            for request_id in self._live:
                self.calls.forget(request_id)
            self._live.clear()
        for stream in broken:
            stream.fail(errors.EngineClosed("the replicas were shut down"))
        wake_all(broken)
        for link in self._links:
            link.close()

    def _send(self, number: int, message: m.ToReplica) -> None:
        self._links[number].send(message)

    # -- placing ---------------------------------------------------------------------------------------------

    def _place(self, live: RoutedRequest) -> None:
        """Send a request to a replica, if one is connected. Called with the lock held."""
        assert self._router is not None
        prompt = (*live.request.prompt, *live.tokens)
        assert self.homes is not None
        choice = self.homes.find(prompt, _salt(live.request), self._clock(), live.request.continues)
        choice = choice or self._router.choose(prompt, _salt(live.request), self.loads, live.request.cache_key)
        if choice is None:
            return
        live.begin_again()
        self.calls.begin_again(live.request.id)
        live.replica, live.load = choice.replica, len(prompt) - choice.num_cached + RUNNING_TOKENS
        self.loads[live.replica] += live.load
        self._links[live.replica].send(m.pack_request(live.remaining))

    def _leave(self, live: RoutedRequest) -> None:
        """Remove the request and its load from its replica."""
        if live.replica is not None:
            self.loads[live.replica] -= live.load
            live.replica, live.load = None, 0

    # -- the links' threads ----------------------------------------------------------------------------------

    def note_up(self, number: int, hello: m.Handshake) -> None:
        """Record that a replica is connected, and send it waiting requests."""
        with self.changed:
            self._learn(number, hello)
            self._up[number], self.loads[number] = None, 0
            _log.info("replica %d has started, pid %d", number, hello.pid)
            self.adapters.note_up(number, hello.adapters)
            if self.control_vectors is not None:
                self.control_vectors.note_up(number)
            for live in self._live.values():
                if live.replica is None:
                    self._place(live)
            self.changed.notify_all()

    def _learn(self, number: int, hello: m.Handshake) -> None:
        """Take the served model from a replica's handshake, and update the smallest capacity of all replicas."""
        if self._hello is None:
            self._router = self._make_router(len(self._links), hello.info.block_size)
            self.control_vectors = None if hello.vectors is None else ReplicatedVectors(hello.vectors, self._send)
            self.homes = SessionAffinity(hello.info.block_size, hello.park_seconds)
        elif not is_same_model(hello.info, self._hello.info):
            raise errors.ShardUnavailable(
                f"replica {number} serves another model than the first replica: {hello.info} instead of "
                f"{self._hello.info}"
            )
        if self._hello is None or hello.info.num_blocks < self._hello.info.num_blocks:
            self._hello = hello
            config = EngineConfig(max_forks=hello.max_forks, max_waiting=hello.max_waiting)
            self._intake = InputProcessor(hello.info, config)

    def note_events(self, number: int, message: m.ToRouter) -> None:
        """Pass a replica's events to the streams of clients. Raises `ShardUnavailable` if the replica reports that it
        cannot compute. A replica that cannot compute counts as lost."""
        woken: list[EventStream] = []
        with self.changed:
            if isinstance(message, m.Heartbeat):
                if not message.is_healthy:
                    raise errors.ShardUnavailable("no replica of the model is available")
                self._up[number] = message
                self.adapters.note_news(number, message.adapters)
            elif isinstance(message, AdapterFetched):
                self.adapters.note_fetched(number, message)
            elif isinstance(message, m.RequestFailed):
                self._break(number, message, woken)
            elif isinstance(message, (ToolAsked, ToolGivenUp)):
                self._call(number, message)
            else:
                self._deliver(number, [m.unpack_event(event) for event in message.events], woken)
        wake_all(woken)

    def _call(self, number: int, message: ToolAsked | ToolGivenUp) -> None:
        """Handle a controller's tool call, or its cancellation. If several controllers steer a request, the id in the
        call consists of the request's id and the controller's number."""
        if isinstance(message, ToolGivenUp):
            self.calls.give_up(number, message)
            return
        live = self._live.get(message.request_id) or self._live.get(message.request_id.rpartition("/")[0])
        if live is not None and live.replica == number:  # else it was cancelled, and the replica will know
            self.calls.ask(number, live.request, message)

    def on_disconnect(self, number: int, reason: str) -> None:
        """Record that a replica is lost; its requests continue on other replicas."""
        with self.changed:
            self._up.pop(number, None)
            self.loads[number] = AWAY
            self.adapters.note_lost(number)
            if self.control_vectors is not None:
                self.control_vectors.note_lost(number)
            self.num_losses += 1
            if self._router is not None:
                self._router.forget(number)
            if self.homes is not None:
                self.homes.forget(number)
            lost = [live for live in self._live.values() if live.replica == number]
            for live in lost:
                self._leave(live)
                live.num_losses += 1
                if live.is_cancelled:
                    self._end(live, FinishReason.CANCELLED, None)
                    continue
                if live.num_losses >= MAX_LOSSES:
                    message = f"the request lost {live.num_losses} replicas, the last: {reason}"
                    self._end(live, FinishReason.ERROR, errors.ShardUnavailable(message))
                    continue
                if (error := self.calls.begin_again(live.request.id)) is not None:
                    self._end(live, FinishReason.ERROR, error)
                    continue
                live.tell_resuming()
                self._place(live)

    def note_absent(self, number: int) -> None:
        """End the waiting requests whose deadlines have passed. A link calls this method while its replica is
        unreachable."""
        now = self._clock()
        with self.changed:
            for live in [live for live in self._live.values() if live.replica is None]:
                deadline = live.request.deadline
                if deadline is not None and deadline <= now:
                    error = errors.DeadlineExceeded("the request's deadline passed while no replica was there")
                    self._end(live, FinishReason.DEADLINE, error)

    # -- delivering, with the lock held ----------------------------------------------------------------------

    def _deliver(self, number: int, events: list[Event], woken: list[EventStream]) -> None:
        by_request: dict[str, list[Event]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for request_id, batch in by_request.items():
            live = self._live.get(request_id)
            if live is None or live.replica != number:
                continue  # the request was cancelled, or runs on another replica
            if any(isinstance(event, PromptEvent) for event in batch):
                self._note_prompt(live)
            try:
                fresh = [event for event in batch if live.is_news(event)]
            except (errors.ControllerError, errors.InternalError) as error:
                self._links[number].send(m.CancelRequest(request_id))
                self._end(live, FinishReason.ERROR, error)
                continue
            if not fresh:
                continue
            live.stream.put(fresh)
            woken.append(live.stream)
            last = fresh[-1]
            if isinstance(last, Finished) and last.is_last:
                self._note_parked(number, live)
                self._forget(live)

    def _note_prompt(self, live: RoutedRequest) -> None:
        """Remove the tokens of a computed prompt from the load of its replica."""
        if live.replica is not None:
            self.loads[live.replica] -= live.load - RUNNING_TOKENS
            live.load = RUNNING_TOKENS

    def _note_parked(self, number: int, live: RoutedRequest) -> None:
        """Remember the replica that retains the KV of a finished request's conversation."""
        if self.homes is not None and (tokens := live.parked_tokens):
            self.homes.keep(live.request.id, tokens, _salt(live.request), number, self._clock())

    def _break(self, number: int, message: m.RequestFailed, woken: list[EventStream]) -> None:
        live = self._live.get(message.request_id)
        if live is not None and live.replica == number:
            live.stream.fail(unpack_error(*message.error))
            woken.append(live.stream)
            self._forget(live)

    def _end(self, live: RoutedRequest, reason: FinishReason, error: errors.BridleError | None) -> None:
        """End all unfinished outputs of the request, and forget the request."""
        live.end(reason, error)
        self._forget(live)

    def _forget(self, live: RoutedRequest) -> None:
        self._leave(live)
        del self._live[live.request.id]
        if self.control_vectors is not None:
            self.control_vectors.leave(live.vectors)
        self.calls.forget(live.request.id)
        if not self._live:
            self.changed.notify_all()


def _salt(request: Request) -> object:
    """Return the salt of a request. Requests share KV blocks only if their salts are equal."""
    scales = sorted(request.sampling.control_vectors.items())
    return (request.salt, request.adapter, *scales, *(medium.key for medium in request.media))


def _with_number(on_loss: Callable[[int, int], None], number: int) -> Callable[[int, str], None]:
    return lambda pid, reason: on_loss(number, pid)
