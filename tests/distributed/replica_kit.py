"""Replicas in this process, each with its own engine and a scripted executor."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bridle.config import EngineConfig
from bridle.controller_tools import ToolExecutor
from bridle.controllers import PythonControllerPool
from bridle.controllers.composite_pool import with_composed
from bridle.distributed.remote_tools import RemoteToolExecutor
from bridle.distributed.replica_server import ReplicaServer
from bridle.distributed.replicas import ReplicaSet
from bridle.distributed.tool_messages import ToolsElsewhere
from bridle.engine import AsyncEngine, Engine
from bridle.engine.interfaces import Executor
from bridle.testing.scripted import ScriptedExecutor
from bridle.testing.text import PieceDecoder
from tests.waiting import PATIENCE

PIECES = [chr(97 + i) for i in range(26)] + ["é", " ", ".", "x", "y", "z"]


class LocalReplica:
    """A replica, which is an engine and its server in a thread with an event loop."""

    def __init__(
        self, path: Path, engine: Engine, config: EngineConfig, desk: RemoteToolExecutor | None = None
    ) -> None:
        self.engine = AsyncEngine(engine).start()
        if desk is not None:
            desk.watch(self.engine.wake)
        self._server = ReplicaServer(self.engine, config, path, desk=desk)
        self._ended: asyncio.Event | None = None
        self._listens = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._listens.wait(PATIENCE)

    def _run(self) -> None:
        async def main() -> None:
            self._ended = asyncio.Event()
            await self._server.run(self._ended, self._listens.set)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(main())

    def cut(self) -> None:
        """Close the connections, which looks to a router like the end of the process."""
        if self._thread.is_alive():
            assert self._ended is not None
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()

    def stop(self) -> None:
        """Stop the replica's server and engine."""
        self.cut()
        self.engine.close()


class Replicas:
    """Several replicas and their router."""

    def __init__(self, folder: Path, executors: list[Executor], config: EngineConfig, **options: Any) -> None:
        self._config = config
        desk: ToolExecutor | None = options.get("tools")
        self.tools = ToolsElsewhere() if desk is None else ToolsElsewhere(desk.names, desk.of_clients, desk.limits)
        self.paths = [folder / f"replica-{number}.sock" for number in range(len(executors))]
        self.replicas = [self._make(path, executor) for path, executor in zip(self.paths, executors, strict=True)]
        self.client = ReplicaSet([str(path) for path in self.paths], **options)
        self.client.start(len(executors), PATIENCE)

    def _make(self, path: Path, executor: Executor) -> LocalReplica:
        desk, size = RemoteToolExecutor(self.tools), executor.info.vocab_size
        pools = with_composed(
            [PythonControllerPool(size, desk, lambda text: [ord(char) % size for char in text])], size
        )
        engine = Engine(executor, self._config, decoder=PieceDecoder(PIECES), pools=pools)
        return LocalReplica(path, engine, self._config, desk)

    def lose(self, number: int) -> None:
        self.replicas[number].stop()
        self.paths[number].unlink(missing_ok=True)

    def restart(self, number: int, executor: Executor) -> None:
        self.replicas[number] = self._make(self.paths[number], executor)

    def close(self) -> None:
        self.client.close()
        for replica in self.replicas:
            replica.stop()


def make_executor(**options: Any) -> ScriptedExecutor:
    return ScriptedExecutor(**{"vocab_size": 32, "num_blocks": 512, "block_size": 4, **options})


@contextlib.contextmanager
def replicated(
    count: int = 2, *, make: Callable[[], Executor] = make_executor, config: EngineConfig | None = None, **options: Any
) -> Iterator[Replicas]:
    """Start `count` replicas and their router, and yield them when all replicas are up."""
    with tempfile.TemporaryDirectory(prefix="bridle-test-") as folder:
        made = Replicas(Path(folder), [make() for _ in range(count)], config or EngineConfig(), **options)
        try:
            yield made
        finally:
            made.close()
