"""Continues after a failed step or a lost device. Some sequences end, some run alone for a while, and all KV is
computed again."""

from __future__ import annotations

from bridle.engine.fault_isolation import FaultIsolator
from bridle.engine.interfaces import Executor
from bridle.engine.outputs.output_processor import OutputProcessor
from bridle.engine.sampling.sample_planner import PlannedSamples, SamplePlanner
from bridle.engine.scheduling.scheduler import Scheduled, Scheduler
from bridle.engine.scheduling.step_plan import SampleBatch
from bridle.errors import BridleError, DeviceLost, InternalError, ShardUnavailable
from bridle.outputs import Resuming


class Recovery:
    """Remembers failed steps and device losses across steps. If the device is lost permanently, `recover` raises the
    error, which ends the engine."""

    def __init__(
        self, executor: Executor, scheduler: Scheduler, branching: SamplePlanner, progress: OutputProcessor
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._branching = branching
        self._progress = progress
        self._blame = FaultIsolator()
        self._is_lost = False  # the device is lost, and the clients were informed
        self.num_failed_steps = 0

    def note_away(self) -> None:
        """Handle a device that became unreachable between two steps."""
        if not self._is_lost:
            self.recover([], PlannedSamples(SampleBatch(0)), ShardUnavailable("the device went away between two steps"))

    def note_success(self, scheduled: list[Scheduled]) -> None:
        """Record that a step succeeded. Failures of earlier steps no longer count."""
        self._is_lost = False
        self._blame.clear([item.seq for item in scheduled])

    def recover(self, scheduled: list[Scheduled], branched: PlannedSamples, error: Exception) -> None:
        """Handle a step that failed with `error`."""
        if isinstance(error, DeviceLost):
            raise error
        self.num_failed_steps += 1
        self._branching.undo(branched)
        self._is_lost = isinstance(error, ShardUnavailable)
        computed = [item.seq for item in scheduled if not item.seq.is_finished]
        failed, suspects = self._blame.judge(computed, error)
        cause = error if isinstance(error, BridleError) else InternalError(f"the step failed: {error!r}")
        for seq in failed:
            self._progress.fail(seq, cause)
        if self._is_lost:
            self._announce_loss()
        self._executor.reset()
        self._scheduler.reset(suspects)

    def _announce_loss(self) -> None:
        """Send `Resuming` events to the clients that asked for such events."""
        for seq in self._scheduler.running.values():
            if seq.request.tell_resuming:
                self._progress.events.append(Resuming(seq.request.id, seq.index))
