"""One engine of a Ray cluster: a replica in Ray Serve that runs a whole engine for the fronts.

The engine uses the messages of `bridle.distributed`, like a local replica. Clocks of two machines may differ, so
deadlines are sent as remaining seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from bridle.controllers.reasoning_gate import compile_grammar
from bridle.distributed import replica_messages as m
from bridle.distributed.codec.controllers import form_to_compile
from bridle.distributed.codec.errors import pack_error
from bridle.distributed.prefix_router import RUNNING_TOKENS
from bridle.distributed.remote_tools import RemoteToolExecutor
from bridle.distributed.tool_messages import ToolAnswered, ToolMessage
from bridle.engine import Request
from bridle.errors import BridleError, ProtocolError, ShardUnavailable
from bridle.launch.ray.adapters import register
from bridle.launch.ray.autoscaling import BUSY_SHARE, QUEUED_TOKENS
from bridle.launch.ray.tools import EngineCalls
from bridle.launch.replica_process import ReplicaConfig, load_watched
from bridle.outputs import Event, Finished, FinishReason, PromptEvent


class EngineReplica:
    """The engine in one replica's process; Ray Serve creates it. `told` is an encoded `ReplicaConfig`. `adapters` maps
    adapter names to sources."""

    def __init__(self, told: str, adapters: dict[str, str]) -> None:
        from ray import serve

        from bridle.launch.launcher import launch_shard
        from bridle.serving import load_model

        config = ReplicaConfig.decode(told)
        launch = partial(launch_shard, shards=config.shards, stands_by=False)  # other engines take over
        executors = launch if config.shards else load_watched
        self._config = config
        model, engine = config.model, config.engine
        if adapters:
            from bridle.model.memory_estimate import settle_adapters

            model, engine = settle_adapters(model, engine)
        desk = RemoteToolExecutor(config.tools)
        self._calls = EngineCalls(desk, serve.get_replica_context().replica_id.unique_id)
        self._model = load_model(model, engine, control=config.control, executors=executors, tools=desk)
        register(self._model.adapters, adapters)
        self._client = self._model.client
        self._queued: dict[str, int] = {}  # prompt tokens of requests whose prompt is not computed yet
        self._num_live = 0
        self._num_reports = 0

    # -- methods that fronts call ----------------------------------------------------------------------------

    async def hello(self) -> bytes:
        """Return the description of this engine's model."""
        engine = self._config.engine
        return m.encode(m.Handshake(m.PROTOCOL, os.getpid(), self._client.info, engine.max_forks, engine.max_waiting))

    async def look(self) -> bytes:
        """Return a heartbeat with the engine's counters."""
        return m.encode(m.pack_beat(self._client.is_healthy, self._client.statistics()))

    async def generate(self, data: bytes) -> AsyncIterator[bytes]:
        """Run a request. Yields batches of the request's events. Leaving the iteration cancels the request."""
        message = m.read_by_replica(data)
        if not isinstance(message, m.Submit):
            raise ProtocolError(f"the front sent {type(message).__name__}; expected a request")
        request_id = message.request.id
        self._queued[request_id] = len(message.request.prompt) + len(message.request.generated)
        self._num_live += 1
        try:
            stream = self._client.submit(await self._unpack(message)).with_progress()
            async with stream, aclosing(self._calls.merged(stream)) as merged:
                async for news in stream if message.controller is None else merged:
                    yield m.encode(news if isinstance(news, ToolMessage) else self._packed(request_id, news))
        except BridleError as error:
            yield self._failure(request_id, error)
        finally:
            self._queued.pop(request_id, None)
            self._num_live -= 1

    def _packed(self, request_id: str, events: list[Event]) -> m.Events:
        if any(isinstance(event, PromptEvent) for event in events):
            self._queued.pop(request_id, None)
        return m.Events([m.pack_event(event) for event in events])

    async def answer(self, data: bytes, address: str) -> None:
        """Accept a front's answer to a tool call of this engine. `address` is only for Ray's router, which finds this
        engine by it."""
        message = m.read_by_replica(data)
        if isinstance(message, ToolAnswered):
            self._calls.answer(message)

    async def _unpack(self, message: m.Submit) -> Request:
        form, pool = form_to_compile(message.controller), self._model.constraints
        grammar = None if form is None or pool is None else await compile_grammar(pool, form)
        request = m.unpack_request(message, grammar)
        if request.deadline is None:
            return request
        return replace(request, deadline=time.monotonic() + request.deadline)

    def _failure(self, request_id: str, error: BridleError) -> bytes:
        """Return the message about a failed request. If this engine is closing, the request continues on another
        engine; any other error ends the request."""
        if self._client.is_healthy:
            return m.encode(m.Events([m.pack_event(Finished(request_id, 0, FinishReason.ERROR, error=error))]))
        return m.encode(m.RequestFailed(request_id, pack_error(error)))

    # -- methods that Serve calls ----------------------------------------------------------------------------

    def check_health(self) -> None:
        """Raise an error while the engine cannot serve requests. After a few failed checks, Serve replaces the
        replica."""
        if not self._client.is_healthy:
            raise ShardUnavailable("the engine is not healthy and cannot serve requests now")

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the engine's report to the router."""
        self._num_reports += 1
        load = sum(self._queued.values()) + RUNNING_TOKENS * self._num_live
        return {"number": self._num_reports, "load": load, "is_ready": self._client.is_healthy}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the engine's report to the autoscaler."""
        places = self._config.engine.max_num_seqs or self._client.info.max_num_seqs
        return {QUEUED_TOKENS: float(sum(self._queued.values())), BUSY_SHARE: self._num_live / places}

    def __del__(self) -> None:
        model = getattr(self, "_model", None)
        if model is not None:
            model.close()
