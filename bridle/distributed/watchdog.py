"""Watches an executor. A callback is called if a step takes much longer than expected, or if the device is lost
permanently.

The watchdog is for a process that computes the model itself, such as a replica. The process's heartbeats continue while
a step hangs, because another thread sends them. A shard needs no watchdog, because its router watches its steps.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from bridle.distributed.codec.embeddings import require_embedder
from bridle.distributed.step_time_estimator import StepTimeEstimator
from bridle.engine.interfaces import Executor, ExecutorInfo, find_async
from bridle.engine.scheduling.step_plan import SampleBatch, StepPlan, StepResult
from bridle.errors import DeviceLost

_LOOK_SECONDS = 1.0


class WatchedExecutor:
    """An `Executor` that wraps and watches another executor. `on_stuck(reason)` is called at most once per step, from
    the watchdog's thread or from the thread that detects the loss of the device."""

    def __init__(
        self,
        executor: Executor,
        on_stuck: Callable[[str], None],
        pace: StepTimeEstimator | None = None,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._executor = executor
        self._on_stuck = on_stuck
        self._pace = pace or StepTimeEstimator()
        self._look_seconds = look_seconds
        self._step: tuple[int, int, float] | None = None  # the current step: its number, its tokens, its start
        self._drawn: tuple[int, int, float] | None = None  # the previous step, until its tokens are received
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bridle-step-watch", daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped executor that the protocol `Executor` does not have, such as its
        adapters."""
        return getattr(self._executor, name)

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    @property
    def num_bytes(self) -> int:
        """Return the memory of the model in bytes, if the executor reports it."""
        return int(getattr(self._executor, "num_bytes", 0))

    def forward(self, plan: StepPlan) -> None:
        self._step = plan.step, plan.num_tokens, time.monotonic()
        try:
            self._executor.forward(plan)
        except BaseException as error:
            self._step = None
            self._note(error)
            raise

    def sample(self, batch: SampleBatch) -> StepResult:
        """Sample tokens. The time limit starts again in this call, because the wait for controllers between `forward`
        and `sample` has its own limit."""
        step = self._step
        try:
            result = self._executor.sample(batch)
        except DeviceLost as error:
            self._note(error)
            raise
        finally:
            self._step = None
        if step is not None:
            self._pace.note(step[1], time.monotonic() - step[2])
        return result

    def sample_async(self, batch: SampleBatch) -> None:
        """Start sampling on an asynchronous executor. The watchdog watches the step whose result is collected next."""
        late = find_async(self._executor)
        assert late is not None  # otherwise the engine does not call this method
        self._drawn, self._step = self._step, None
        try:
            late.sample_async(batch)
        except BaseException as error:
            self._drawn = None
            self._note(error)
            raise

    def get_result(self) -> StepResult:
        """Wait for the tokens of the oldest `sample_async`, with a time limit as in `sample`."""
        late, drawn = find_async(self._executor), self._drawn
        assert late is not None
        try:
            result = late.get_result()
        except DeviceLost as error:
            self._note(error)
            raise
        finally:
            self._drawn = None
        if drawn is not None:
            self._pace.note(drawn[1], time.monotonic() - drawn[2])
        return result

    def embed(self, step: int, logits_rows: Sequence[int]) -> list[array[float]]:
        """Return embedding vectors from the device, with the time limit of a step, as in `sample`."""
        self._step = step, len(logits_rows), time.monotonic()
        try:
            return require_embedder(self._executor).embed(step, logits_rows)
        finally:
            self._step = None

    def reset(self) -> None:
        self._executor.reset()

    def close(self) -> None:
        """Close the executor and end the watchdog. Idempotent."""
        self._closed.set()
        self._executor.close()

    def _note(self, error: BaseException) -> None:
        """Call `on_stuck` if the error means that the device is lost permanently."""
        if isinstance(error, DeviceLost):
            self._on_stuck(f"the device is lost: {error}")

    def _watch(self) -> None:
        told = -1
        while not self._closed.wait(self._look_seconds):
            step = self._drawn or self._step
            if step is None or step[0] == told:
                continue
            number, num_tokens, began = step
            limit = self._pace.limit(num_tokens)
            if time.monotonic() - began > limit:
                told = number
                self._on_stuck(f"step {number} took longer than {limit:.1f} s")
