"""A lab whose engine is replaced by two replicas: requests pass a router and two sockets, and return as events. The
replicas are engines of this process, each in its own thread. The controllers of a test are functions, so the messages
have only their names. Each engine is checked after each step, as in other labs."""

from __future__ import annotations

import tempfile
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bridle.config import EngineConfig
from bridle.controllers.reasoning_gate import CompiledGrammar
from bridle.distributed import replica_messages
from bridle.distributed.replica_messages import Events, Heartbeat, RequestFailed, add_beat, pack_beat
from bridle.distributed.replicas import ReplicaSet
from bridle.engine import Engine, Request
from bridle.engine.client import EventStream
from bridle.engine.statistics import EngineStatistics
from bridle.outputs import Event
from bridle.testing.scripted import ScriptedExecutor
from tests.distributed.replica_kit import LocalReplica
from tests.engine.support import Lab
from tests.fakes.controller_runtime import FakeController, FakeControllerPool

#: How long a step waits for news before it lets the lab's clock move, in seconds.
_PATIENCE = 0.005


class CheckedEngine(Engine):
    """An engine that checks itself after each step. A failed check ends its thread and every stream."""

    def __init__(self, executor: ScriptedExecutor, config: EngineConfig, pool: FakeControllerPool, lab: Lab) -> None:
        self._checked = executor, pool
        super().__init__(executor, config, pools=[pool], decoder=lab.decoder, clock=lab.clock)

    def step(self) -> list[Event]:
        executor, pool = self._checked
        pool.settle()
        events = super().step()
        self.check_integrity()
        assert not executor.violations, executor.violations[0]
        assert not pool.violations, pool.violations[0]
        return events


class _Pools:
    """The controller pools of all replicas, seen as one pool. The engines' threads call the pools."""

    def __init__(self, pools: list[FakeControllerPool]) -> None:
        self._pools = pools

    @property
    def live(self) -> frozenset[int]:
        return frozenset().union(*(pool.live for pool in self._pools))

    @property
    def violations(self) -> list[str]:
        return [each for pool in self._pools for each in pool.violations]

    def settle(self) -> None: ...


class _Router(ReplicaSet):
    """A replica set that signals new events."""

    def __init__(self, paths: list[str], news: threading.Event) -> None:
        self._news = news
        super().__init__(paths)

    def note_events(self, number: int, message: Events | RequestFailed | Heartbeat) -> None:
        super().note_events(number, message)
        self._news.set()


class ReplicaLab:
    """A lab whose engine is a router with two replicas."""

    @staticmethod
    def prepare(monkeypatch: pytest.MonkeyPatch) -> None:
        """Send the controllers of a test by name, and allow long pauses, because the replicas share this process."""
        names = count()
        known: dict[int, object] = {}
        pack, unpack = replica_messages.pack_controller, replica_messages.unpack_controller

        def pack_fake(controller: object) -> dict[str, Any] | None:
            if isinstance(controller, FakeController) or callable(controller):
                known[number := next(names)] = controller
                return {"fake": number}
            return pack(controller)

        def unpack_fake(plain: dict[str, Any] | None, grammar: CompiledGrammar | None = None) -> object | None:
            return known[plain["fake"]] if plain and "fake" in plain else unpack(plain, grammar)

        monkeypatch.setattr(replica_messages, "pack_controller", pack_fake)
        monkeypatch.setattr(replica_messages, "unpack_controller", unpack_fake)

    def __init__(self, lab: Lab, config: EngineConfig, options: dict[str, Any]) -> None:
        executors = [lab.executor, ScriptedExecutor(clock=lab.clock, **options)]
        pools = [FakeControllerPool(lab.clock) for _ in executors]
        lab.pool = _Pools(pools)  # type: ignore[assignment]
        self._folder = tempfile.TemporaryDirectory(prefix="bridle-test-")
        paths = [Path(self._folder.name) / f"{number}.sock" for number in range(len(executors))]
        self._replicas = [
            LocalReplica(path, CheckedEngine(executor, config, pool, lab), config)
            for path, executor, pool in zip(paths, executors, pools, strict=True)
        ]
        self._news = threading.Event()
        self._router = _Router([str(path) for path in paths], self._news)
        self._router.start(len(executors), 60)
        self._streams: dict[str, EventStream] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._streams)

    def add(self, request: Request) -> None:
        self._streams[request.id] = self._router.submit(request)

    def cancel(self, request_id: str) -> None:
        self._router.cancel(request_id)

    def release_retained_kv(self, request_id: str) -> None:
        self._router.release_retained_kv(request_id)

    def step(self) -> list[Event]:
        """Return the events of all replicas that have arrived or arrive within a short time."""
        self._news.wait(_PATIENCE)
        self._news.clear()
        events: list[Event] = []
        for request_id, stream in list(self._streams.items()):
            while taken := stream.read_nowait():
                events += taken
            if taken is None:
                del self._streams[request_id]
        return events

    def check_integrity(self) -> None:
        """Do nothing, because every engine checks itself."""

    def statistics(self) -> EngineStatistics:
        """Return the current statistics, summed over the engines."""
        total = EngineStatistics()
        for replica in self._replicas:
            add_beat(total, pack_beat(True, replica.engine.statistics()))
        return total

    def close(self) -> None:
        self._router.close()
        for replica in self._replicas:
            replica.stop()
        self._folder.cleanup()
