"""Restarts engines of a server that fail or hang. The pauses between restarts grow, and after too many failures the
engine is given up.

An engine has failed if its thread ended with an error, such as a lost device. An engine hangs if one step takes longer
than the operator allows. The length of a step is not measured with a clock. Instead, the supervisor counts its own
checks during the step. The checks of a process that is stopped for an hour (SIGSTOP, a suspended machine) also stop, so
the engine does not seem to hang.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridle.errors import BridleError, EngineFailed, InvalidRequest
from bridle.serving.models.model_loader import ModelManager
from bridle.serving.models.model_slot import Slot

if TYPE_CHECKING:
    from bridle.engine import AsyncEngine

_log = logging.getLogger(__name__)

#: Seconds between two checks of the engines.
LOOK_SECONDS = 0.25
#: Maximum pause before a restart, in seconds. The first restart has no pause, the second one second; then the pause
#: doubles.
MAX_PAUSE = 30.0
#: Seconds that an engine must run after a restart so that its next restart has no pause.
PROVEN_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """A step may last `watchdog_timeout` seconds (0: unlimited). After `max_restarts` restarts in a row without
    success, the model is no longer served. If the server serves no other model, it then ends."""

    watchdog_timeout: float = 300.0
    max_restarts: int = 5

    def __post_init__(self) -> None:
        if not self.watchdog_timeout >= 0:
            value = f"watchdog_timeout is {self.watchdog_timeout}; must be at least 0, which means no limit"
            raise InvalidRequest(value, "watchdog_timeout")
        if self.max_restarts < 0:
            raise InvalidRequest(
                f"max_engine_restarts is {self.max_restarts}; must be at least 0", "max_engine_restarts"
            )

    def pause(self, num_faults: int) -> float:
        """Return the seconds to wait before the restart after `num_faults` failures in a row."""
        return 0.0 if num_faults < 2 else min(2.0 ** (num_faults - 2), MAX_PAUSE)


class EngineSupervisor:
    """Checks the engines of the slots that `slots()` returns. `keeper` loads the models of failed engines again;
    `give_up` ends the server with an error. All methods are called in the registry's event loop."""

    def __init__(
        self,
        slots: Callable[[], Iterable[Slot]],
        keeper: ModelManager | None,
        policy: RestartPolicy,
        give_up: Callable[[BridleError], None],
    ) -> None:
        self._slots, self._keeper, self._policy, self._give_up = slots, keeper, policy, give_up
        # the step of each engine, and the number of checks since it began
        self._watched: dict[Slot, tuple[int | None, int]] = {}
        self._num_good: dict[Slot, int] = {}  # number of checks since the restart at which the engine ran

    async def run(self) -> None:
        """Check the engines repeatedly, until this task is cancelled. Cancelling the task also ends restarts in
        progress."""
        try:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                self.look()
        finally:
            for slot in self._slots():
                if slot.is_restarting and slot.task is not None:
                    slot.task.cancel()

    def look(self) -> None:
        """Restart the engines that have failed since the last check."""
        self._watched = {slot: seen for slot, seen in self._watched.items() if slot.model is not None}
        self._num_good = {slot: count for slot, count in self._num_good.items() if slot.model is not None}
        for slot in list(self._slots()):
            client = None if slot.model is None else slot.model.local_engine
            if slot.is_restarting and slot.model is None and slot.task is None and not slot.is_given_up:
                self._restart(slot, str(slot.failure))
            elif client is not None:
                self._end_stuck(slot, client)
                if not self.restart_failed(slot):
                    self._count_good(slot)

    def restart_failed(self, slot: Slot) -> bool:
        """Restart the engine of a slot if it has failed. Returns whether the engine had failed."""
        client = None if slot.model is None else slot.model.local_engine
        if client is None or client.fault is None:
            return False
        self._restart(slot, str(client.fault))
        return True

    def _end_stuck(self, slot: Slot, client: AsyncEngine) -> None:
        """Abandon an engine whose current step takes too long."""
        step, limit = client.step_under_way, self._policy.watchdog_timeout
        before, num_looks = self._watched.get(slot, (None, 0))
        num_looks = num_looks + 1 if step is not None and step == before else 0
        self._watched[slot] = step, num_looks
        if limit and num_looks * LOOK_SECONDS > limit and client.fault is None and slot.model is not None:
            _log.error(
                "the engine of %s hangs: step %s has not ended within %g s (watchdog_timeout)", slot.name, step, limit
            )
            slot.model.abandon(EngineFailed(f"the engine hung in a step for more than {limit:g} s; try again"))

    def _restart(self, slot: Slot, reason: str) -> None:
        slot.num_faults += 1
        self._num_good.pop(slot, None)
        self._watched.pop(slot, None)
        most = self._policy.max_restarts
        if self._keeper is None or slot.config is None or slot.num_faults > most:
            self._abandon(slot, reason)
            return
        pause = self._policy.pause(slot.num_faults)
        _log.error(
            "the engine of %s failed: %s. Restart %d of at most %d follows in %g s",
            slot.name,
            reason,
            slot.num_faults,
            most,
            pause,
        )
        self._keeper.restart(slot, pause)

    def _abandon(self, slot: Slot, reason: str) -> None:
        """Stop serving the model. If the server serves no other model, it ends."""
        message = f"the engine of {slot.name!r} failed after {slot.num_faults - 1} restarts"
        others = (each.model for each in self._slots() if each is not slot)
        if self._keeper is None or not any(model is not None and model.client.is_healthy for model in others):
            self._give_up(EngineFailed(f"{message}; the server ends: {reason}"))
            return
        _log.error("%s, and is not restarted again; restart the server to serve it: %s", message, reason)
        self._keeper.give_up(slot, f"{message}; the operator has to start the server again")

    def _count_good(self, slot: Slot) -> None:
        if slot.num_faults:
            self._num_good[slot] = num_good = self._num_good.get(slot, 0) + 1
            if num_good * LOOK_SECONDS > PROVEN_SECONDS:
                slot.num_faults = 0
                del self._num_good[slot]
