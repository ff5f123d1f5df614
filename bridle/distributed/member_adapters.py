"""Loads and unloads LoRA adapters in all ranks except rank 0, in parallel to steps, in the order of rank 0's requests.

Rank 0 requests only adapters that rank 0 could load. So an error in another rank means that the ranks differ.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

from bridle.distributed.adapter_calls import load, unload
from bridle.distributed.proto import shard_pb2 as pb
from bridle.engine.interfaces import Executor
from bridle.engine.scheduling.step_plan import StepPlan

_log = logging.getLogger(__name__)


class RankAdapterLoader:
    """Loads and unloads adapters in a separate thread. A step waits only for the adapters that its plan names."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bridle-adapters")
        self._last: dict[str, Future[None]] = {}  # the last request for each adapter

    def handle(self, request: pb.StepRequest) -> bool:
        """Begin to load or unload an adapter if the request is about adapters. Returns whether the request is about
        adapters."""
        match request.WhichOneof("kind"):
            case "load_adapter":
                name, work = request.load_adapter.name, lambda: load(self._executor, request.load_adapter)
            case "unload_adapter":
                name, work = request.unload_adapter.name, lambda: unload(self._executor, request.unload_adapter)
            case _:
                return False
        self._last[name] = self._thread.submit(work)
        return True

    def await_plan(self, plan: StepPlan) -> None:
        """Wait until the adapters that the plan names are loaded. Raises the error of a load that failed."""
        for name in {row.adapter for row in plan.rows if row.adapter is not None}:
            asked = self._last.pop(name, None)
            if asked is not None:
                asked.result()
        for name in [name for name, asked in self._last.items() if asked.done()]:
            self._last.pop(name).result()
