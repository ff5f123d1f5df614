"""Finds deadlocks: requests that can never continue, because each of their outputs waits for another output.

Only the outputs of a request can set its variables. A request is in a deadlock if every output waits for a variable
without a time limit. The second condition is that the controller of every output was asked after all outputs had begun
to wait. Under both conditions, no controller's answer can change. A *turn* asks the controller of each waiting output
once; a deadlock is found after at most two turns. A controller that answers only with no-ops may be counting its turns,
in order to act later. So a request ends only after many turns in which all its outputs wait or answer with a no-op. The
number of turns per second is fixed. If a step takes longer than a turn, a controller is asked several times in one
step. This module uses no controller pools and no steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bridle.engine.control.decision import Decision, WaitsFor
from bridle.engine.sequence import Sequence

#: Number of turns per second when all outputs of a request wait or do nothing.
_PACE = 1_000.0
#: Maximum number of turns in one step.
_MAX_AT_ONCE = 50
_MAX_NAMED = 8
_MAX_NAME_CHARS = 60


@dataclass(slots=True)
class _Rest:
    """An output, and the variable for which it waits. `since` and `answered` are numbers of rounds. The output began to
    wait in round `since`. The controller was asked for the output's last answer in round `answered`."""

    seq: Sequence
    target: WaitsFor | None = None  # None: the output is active
    num_turns: int = 0
    began: float = 0.0
    since: int = 0
    answered: int = 0


class DeadlockWatch:
    """Records each answer of each controller, to find deadlocks. `max_turns` limits the turns in a row in which all
    outputs of a request do nothing."""

    def __init__(self, max_turns: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_turns = max_turns
        self._clock = clock
        self.round = 0  # the number of the latest round
        self._groups: dict[str, dict[int, _Rest]] = {}

    def add(self, seq: Sequence) -> None:
        """Start to watch a new output that has a controller."""
        self._groups.setdefault(seq.request.id, {})[seq.id] = _Rest(seq)

    def drop(self, seq: Sequence) -> None:
        """Stop watching an output that has ended. Idempotent. Other outputs may wait for a variable that this output
        wrote last. So the controllers of the other outputs must be asked once more before these outputs count as
        stuck."""
        group = self._groups.get(seq.request.id)
        if group is None or group.pop(seq.id, None) is None:
            return
        for rest in group.values():
            rest.since = self.round
        if not group:
            del self._groups[seq.request.id]

    def next_round(self) -> None:
        """Begin a new round, before the controllers are asked in that round."""
        self.round += 1

    def turns_due(self, seq: Sequence) -> int:
        """Return how many times the controller of `seq` may be asked in this round while it does nothing. The number is
        1 if any output of the request is active."""
        group = self._groups.get(seq.request.id, {})
        if seq.id not in group or any(rest.target is None for rest in group.values()):
            return 1
        seconds = self._clock() - max(rest.began for rest in group.values())
        num_turns = group[seq.id].num_turns
        due = min(int(seconds * _PACE), self._max_turns + 1) - num_turns
        return min(max(due, 1), _MAX_AT_ONCE)

    def note_decision(self, seq: Sequence, decision: Decision, turns: int = 1) -> str | None:
        """Process an answer for which the controller was asked `turns` times. Returns the reason why the request can
        never continue, or None."""
        group = self._groups.get(seq.request.id, {})
        rest = group.get(seq.id)
        if rest is None:
            return None
        target = decision.waits_for
        if target is None:
            rest.target, rest.num_turns = None, 0
            return None
        if rest.target is None:
            rest.began = self._clock()
        if target != rest.target:
            rest.target, rest.since = target, self.round
        rest.num_turns += turns
        rest.answered = seq.control.asked_round
        return self._verdict(list(group.values()))

    def members(self, seq: Sequence) -> list[Sequence]:
        """Return all outputs of the request of `seq` that have not ended."""
        return [rest.seq for rest in self._groups.get(seq.request.id, {}).values()]

    def _verdict(self, group: list[_Rest]) -> str | None:
        if any(rest.target is None for rest in group):
            return None
        began = max(rest.since for rest in group)
        if all(rest.target and rest.answered > began for rest in group):
            return f"deadlock: {_described(group)}, and no output is left to set it"
        num_turns = min(rest.num_turns for rest in group)
        if num_turns > self._max_turns:
            limit = self._max_turns
            return f"deadlock: every output of the request waited for {num_turns} turns in a row; at most {limit}"
        return None


def _described(group: list[_Rest]) -> str:
    """Return a text that names the output that waits and the variable that it waits for."""
    parts = []
    for rest in group[:_MAX_NAMED]:
        names = " and ".join(repr(name[:_MAX_NAME_CHARS]) for name, _ in rest.target or ())
        parts.append(f"output {rest.seq.index} waits for variable {names}")
    if len(group) > _MAX_NAMED:
        parts.append(f"{len(group) - _MAX_NAMED} more outputs wait likewise")
    return ", ".join(parts)
