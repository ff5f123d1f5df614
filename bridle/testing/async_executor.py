"""A scripted executor that returns its results later, like an executor whose device computes while its caller does
other work.

Calls of the executor only queue work. The queued work is done in order, at the first wait for it and never earlier. So
a test notices if a token is read before `get_result`. Placeholders in a plan are replaced by the simulated device,
which already has the sampled tokens.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, StepPlan, StepResult, placeholder_for_row
from bridle.errors import BridleError
from bridle.kv_store.records import Snapshot
from bridle.testing.kv import FakeStates, PagedKV
from bridle.testing.mirror import require
from bridle.testing.scripted import Recorded, ScriptedBlocks, ScriptedExecutor


class LateCopy:
    """A copy that the simulated device makes after the work that was queued before it. The copy is empty if the device
    was reset before making it."""

    def __init__(self, device: LateScriptedExecutor, read: Callable[[], bytes]) -> None:
        self._device, self._read, self._data = device, read, b""
        device.later(self._make)

    def _make(self) -> None:
        self._data = self._read()

    def copy_into(self, memory: memoryview) -> None:
        self._device.after_all(lambda: memory.__setitem__(slice(None), self._data))


class LateBlocks(ScriptedBlocks):
    """The blocks of a device that returns its results later. Any memory of the host can be used for copies."""

    def __init__(self, device: LateScriptedExecutor, paged: PagedKV, states: FakeStates, identity: str) -> None:
        super().__init__(paged, states, identity)
        self._device = device

    def read_block(self, block: int) -> Snapshot:
        return LateCopy(self._device, lambda: self._paged.read_block(block))

    def read_state(self, slot: int) -> Snapshot:
        return LateCopy(self._device, lambda: self._states.read(slot))

    def write_block(self, block: int, data: memoryview) -> None:
        self._device.after_all(lambda: self._paged.write_block(block, data))

    def write_state(self, slot: int, data: memoryview) -> None:
        self._device.after_all(lambda: self._states.write(slot, data))

    def allocate_host(self, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))


class LateScriptedExecutor(ScriptedExecutor):
    """A `ScriptedExecutor` whose sampling has two parts, `sample_async` and `get_result`. The executor takes the same
    options as `ScriptedExecutor`. `device_time` needs a clock; sampling takes no time. `forward` raises the errors in
    `faults`; `get_result` raises those in `sample_faults`. `num_ahead` counts steps that were launched before the
    tokens of the previous step were taken. `num_named` counts the rows with a placeholder in the steps that were
    launched early."""

    is_async = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_ahead = self.num_named = 0
        self._queue: deque[Callable[[], None]] = deque()
        self._working = threading.RLock()  # other threads than the engine's also wait for the device
        self._batch: SampleBatch | None = None  # sampled, and not taken yet
        self._result: StepResult | None = None  # the result of `_batch`, once the device has computed it
        self._tokens: list[int] = []  # tokens of the last batch
        self._forward_done = 0.0  # time at which the last forward is done
        self._draw_done = 0.0

    def forward(self, plan: StepPlan) -> None:
        """Queue the plan. `forward` raises a fault at once. Tokens that were sampled earlier can still be read."""
        self._notice(plan)
        names = [token for row in plan.rows for token in row.new_tokens if token < 0]
        with Recorded(self.violations):
            require(not names or self._batch is not None, f"step {plan.step} names tokens that were taken")
        self.num_ahead += self._batch is not None
        self.num_named += len(names)
        self.device.run(plan)
        self._forward_done = self.device.busy_until
        self._queue.append(lambda: self._compute(plan))

    def sample_async(self, batch: SampleBatch) -> None:
        """Queue the sampling of the batch."""
        with Recorded(self.violations):
            require(self._batch is None, f"step {batch.step} draws while another one was not taken")
        self._batch, self._draw_done = batch, self._forward_done
        self._queue.append(lambda: self._draw_all(batch))

    def get_result(self) -> StepResult:
        """Wait until the device has sampled the batch, and return the result."""
        with Recorded(self.violations):
            require(self._batch is not None, "nothing was drawn that could be taken")
        self._fail(self.device.begin_sample(until=self._draw_done))
        while self._result is None:
            self._work()
        result, self._batch, self._result = self._result, None, None
        return result

    def sample(self, batch: SampleBatch) -> StepResult:
        self.sample_async(batch)
        return self.get_result()

    def await_forward(self, seconds: float) -> bool:
        """Advance the clock, at most to the end of the last forward pass."""
        clock = self.device.clock
        if clock is not None:
            clock.wait_until(min(self._forward_done, clock() + seconds))
        if clock is not None and clock() < self._forward_done:
            return False
        self._catch_up()
        return True

    def reset(self) -> None:
        """Forget all state, including queued work."""
        with self._working:
            super().reset()
            self._queue.clear()
            self._batch = self._result = None

    # -- the device ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Do the first item of the queued work."""
        with self._working:
            if self._queue:
                self._queue.popleft()()

    def _catch_up(self) -> None:
        with self._working:
            while self._queue:
                self._queue.popleft()()

    def after_all(self, work: Callable[[], None]) -> None:
        """Do all queued work, and then call `work`."""
        with self._working:
            self._catch_up()
            work()

    def later(self, work: Callable[[], None]) -> None:
        """Queue `work` for the device."""
        self._queue.append(work)

    def _make_blocks(self, identity: str) -> ScriptedBlocks:
        return LateBlocks(self, self._paged, self._states, identity)

    def _fail(self, fault: BridleError | None) -> None:
        if fault is None:
            return
        self._catch_up()
        drawn = self._batch, self._result
        try:
            super()._fail(fault)
        finally:
            self._batch, self._result = drawn

    def _compute(self, plan: StepPlan) -> None:
        super().compute(replace(plan, rows=[self._named(row) for row in plan.rows]))

    def _named(self, row: PlanRow) -> PlanRow:
        """Return the row with tokens in place of its placeholders."""
        if not row.new_tokens or row.new_tokens[-1] >= 0:
            return row  # only the last token can be a placeholder
        drawn = self._tokens[placeholder_for_row(row.new_tokens[-1])]
        return replace(row, new_tokens=(*row.new_tokens[:-1], max(drawn, 0)))

    def _draw_all(self, batch: SampleBatch) -> None:
        self._result = self.read(batch)
        self._tokens = self._result.tokens
