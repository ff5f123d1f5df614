"""Simulates which calls of a device fail, and how long a step takes. The device's results are not simulated here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bridle.engine.scheduling.step_plan import StepPlan
from bridle.errors import BridleError
from bridle.testing.clock import Clock


class PlayedDevice:
    """Simulates the failures and the durations of a device. `faults` and `sample_faults` map the numbers of calls (from
    0) to the errors with which they fail. A forward pass takes `seconds(plan)` seconds of `clock`. A call of `forward`
    returns at once, and sampling waits for the remaining time."""

    def __init__(
        self,
        faults: Mapping[int, BridleError] | None = None,
        sample_faults: Mapping[int, BridleError] | None = None,
        clock: Clock | None = None,
        seconds: Callable[[StepPlan], float] | None = None,
    ) -> None:
        if seconds is not None and clock is None:
            raise ValueError("device_time needs a clock")
        self.faults, self.sample_faults = dict(faults or {}), dict(sample_faults or {})
        self.num_forwards = self.num_samples = 0
        self.clock, self._seconds = clock, seconds
        self.busy_until = 0.0

    def begin_forward(self) -> BridleError | None:
        """Count a forward pass. Returns the error of this call if it must fail, else None."""
        self.num_forwards += 1
        return self.faults.get(self.num_forwards - 1)

    def run(self, plan: StepPlan) -> None:
        """Let the device compute the plan from now on, or after its current work."""
        if self.clock is not None and self._seconds is not None:
            self.busy_until = max(self.busy_until, self.clock()) + self._seconds(plan)

    def begin_sample(self, until: float | None = None) -> BridleError | None:
        """Wait for the device, or until the time `until` if that comes first. The call counts as one call of the
        sampler. Returns the error of this call if it must fail, else None."""
        self.num_samples += 1
        if self.clock is not None:
            self.clock.wait_until(self.busy_until if until is None else until)
        return self.sample_faults.get(self.num_samples - 1)
