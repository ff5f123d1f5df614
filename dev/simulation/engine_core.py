"""The real engine in virtual time, with its scheduler, blocks and prefix cache, over a device that computes nothing.

The device samples the tokens of the workload's script, and advances the virtual time by the cost of a step of that
size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bridle.config import EngineConfig
from bridle.distributed.replica_messages import CancelRequest, Submit, WireEvent, pack_event, unpack_request
from bridle.engine.engine import Engine
from bridle.engine.interfaces import Executor, ExecutorInfo
from bridle.engine.scheduling.step_plan import SampleBatch, StepPlan, StepResult
from bridle.errors import BridleError
from bridle.outputs import Event, Finished, FinishReason
from dev.simulation.core import CoreWork
from dev.simulation.cost import SimulatedStepCost, StepSize
from dev.simulation.timeline import LocalClock
from dev.simulation.workload import drawn_token

#: Seconds after which an engine that has requests but no work to compute tries again.
_PAUSE = 0.001


class CountingExecutor:
    """An `Executor` that computes nothing: a step advances `clock` by its estimated time."""

    def __init__(self, info: ExecutorInfo, cost: SimulatedStepCost, clock: LocalClock) -> None:
        self._info = info
        self._cost = cost
        self._clock = clock
        self._end = 0.0
        self.num_tokens = 0

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def forward(self, plan: StepPlan) -> None:
        size = StepSize.of(plan)
        self.num_tokens += size.tokens
        self._end = self._clock.now + self._cost.seconds(size.rows, size.tokens, size.context)

    def sample(self, batch: SampleBatch) -> StepResult:
        self._clock.now = self._end
        tokens = [drawn_token(row.key, row.draw) for row in batch.rows]
        return StepResult(batch.step, tokens, [None] * len(tokens))

    def reset(self) -> None:
        """Do nothing, because the executor has no state."""

    def close(self) -> None:
        """Do nothing, because the executor has no memory to release."""


MakeExecutor = Callable[[ExecutorInfo, SimulatedStepCost, LocalClock], Executor]


class EngineCore:
    """A `Core` that runs steps of a real `Engine`."""

    def __init__(
        self,
        info: ExecutorInfo,
        cost: SimulatedStepCost,
        config: EngineConfig | None = None,
        make_executor: MakeExecutor = CountingExecutor,
    ) -> None:
        self._clock = LocalClock()
        self.executor = make_executor(info, cost, self._clock)
        self.engine = Engine(self.executor, config, clock=self._clock)
        self._busy_seconds = 0.0
        self._events: list[Event] = []

    @property
    def info(self) -> ExecutorInfo:
        return self.engine.info

    @property
    def work(self) -> CoreWork:
        statistics = self.engine.statistics()
        return CoreWork(
            self._busy_seconds, statistics.num_steps, statistics.num_computed_tokens, statistics.num_preemptions
        )

    def take(self, messages: Sequence[Submit | CancelRequest]) -> None:
        """Handle messages as `AsyncEngine` handles its inbox."""
        for message in messages:
            if isinstance(message, CancelRequest):
                self.engine.cancel(message.id)
                continue
            try:
                self.engine.add(unpack_request(message))
            except BridleError as error:
                self._events.append(Finished(message.request.id, 0, FinishReason.ERROR, error=error))

    def begin(self, now: float) -> float | None:
        """Run a step now; its results are reported after its duration."""
        self._clock.now = now
        if self.engine.has_work:
            self._events += self.engine.step()
            if self._clock.now == now:
                self._clock.now += _PAUSE
            self._busy_seconds += self._clock.now - now
        return self._clock.now if self._events or self.engine.has_work else None

    def shorten(self, now: float) -> float | None:
        """Return None, because a step cannot be shortened."""
        return None

    def finish(self) -> list[WireEvent]:
        events, self._events = self._events, []
        return [pack_event(event) for event in events]

    def leave(self, now: float) -> list[WireEvent]:
        """Return no events, because the results of the step in progress are lost."""
        self.engine.close()
        return []
