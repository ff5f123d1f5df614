"""A scripted executor that answers late, as one does whose device works on while its caller does other things.

Calls only queue work. It is done on the first wait for it, in order and never earlier, so that reading a token before
it was taken finds none. The names of tokens in a plan are looked up by the device, which has sampled them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, StepPlan, StepResult, placeholder_for_row
from bridle.errors import BridleError
from bridle.testing.mirror import require
from bridle.testing.scripted import Recorded, ScriptedExecutor


class LateScriptedExecutor(ScriptedExecutor):
    """A `ScriptedExecutor` in two parts. It takes the same options, and needs a clock for `device_time`; draws take
    none. `faults` are raised by `forward`, `sample_faults` by `take`. `num_ahead` counts the steps that were launched
    before the tokens of the one before were taken, `num_named` their rows that named such a token."""

    is_async = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_ahead = self.num_named = 0
        self._queue: deque[Callable[[], None]] = deque()
        self._batch: SampleBatch | None = None  # drawn, and not taken
        self._result: StepResult | None = None  # of that, if the device has come to it
        self._tokens: list[int] = []  # of the last draw
        self._forward_done = 0.0  # by the clock
        self._draw_done = 0.0

    def forward(self, plan: StepPlan) -> None:
        """Queue the plan. A fault is raised here; what was sampled before can be taken all the same."""
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
        """Queue the batch."""
        with Recorded(self.violations):
            require(self._batch is None, f"step {batch.step} draws while another one was not taken")
        self._batch, self._draw_done = batch, self._forward_done
        self._queue.append(lambda: self._draw_all(batch))

    def get_result(self) -> StepResult:
        """Wait for the device to come so far."""
        with Recorded(self.violations):
            require(self._batch is not None, "nothing was drawn that could be taken")
        self._fail(self.device.begin_sample(until=self._draw_done))
        while self._result is None:
            self._queue.popleft()()
        result, self._batch, self._result = self._result, None, None
        return result

    def sample(self, batch: SampleBatch) -> StepResult:
        self.sample_async(batch)
        return self.get_result()

    def await_forward(self, seconds: float) -> bool:
        """Let the clock continue, at most to the end of the last forward."""
        clock = self.device.clock
        if clock is not None:
            clock.wait_until(min(self._forward_done, clock() + seconds))
        if clock is not None and clock() < self._forward_done:
            return False
        self._catch_up()
        return True

    def reset(self) -> None:
        """Forget everything, queued work included."""
        super().reset()
        self._queue.clear()
        self._batch = self._result = None

    # -- the device ----------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        while self._queue:
            self._queue.popleft()()

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
        """The row with the tokens that its names stand for."""
        if not row.new_tokens or row.new_tokens[-1] >= 0:
            return row  # none but the last can be a name
        drawn = self._tokens[placeholder_for_row(row.new_tokens[-1])]
        return replace(row, new_tokens=(*row.new_tokens[:-1], max(drawn, 0)))

    def _draw_all(self, batch: SampleBatch) -> None:
        self._result = self.read(batch)
        self._tokens = self._result.tokens
