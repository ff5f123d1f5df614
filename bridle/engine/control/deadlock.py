"""Finds requests that can never continue, because each of their outputs waits for another one.

Only the outputs of a request can set its variables. A request is in a deadlock if every output waits for a variable
without a time limit, and every output was asked again after all had begun to wait. Then no answer can change. A
deadlock is found within two turns. An output that only answers with a no-op may be counting. So a request is ended
after many turns in which all its outputs wait or answer with a no-op. Turns have a fixed rate: if the engine is slower,
a controller is asked several times in one step. This module does not know pools or steps.
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
    """State of an output that waits. `since` and `answered` are numbers of rounds: when the output began to wait, and
    when it was asked for its last answer."""

    seq: Sequence
    target: WaitsFor | None = None  # None: the output is active
    num_turns: int = 0
    began: float = 0.0
    since: int = 0
    answered: int = 0


class DeadlockWatch:
    """Records every answer of controllers. `max_turns` limits how often in a row all outputs of a request may do
    nothing."""

    def __init__(self, max_turns: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_turns = max_turns
        self._clock = clock
        self.round = 0  # the number of the latest round
        self._groups: dict[str, dict[int, _Rest]] = {}

    def add(self, seq: Sequence) -> None:
        """Watch a controlled output that was created."""
        self._groups.setdefault(seq.request.id, {})[seq.id] = _Rest(seq)

    def drop(self, seq: Sequence) -> None:
        """Stop watching an output that is over. Idempotent. Other outputs may wait for a variable that it wrote last,
        so they count as not asked since then."""
        group = self._groups.get(seq.request.id)
        if group is None or group.pop(seq.id, None) is None:
            return
        for rest in group.values():
            rest.since = self.round
        if not group:
            del self._groups[seq.request.id]

    def next_round(self) -> None:
        """Begin a round, before the asks of this round are sent."""
        self.round += 1

    def turns_due(self, seq: Sequence) -> int:
        """Return how often in a row `seq` may be asked in this round while it does nothing. The result is 1 if another
        output of its request is active."""
        group = self._groups.get(seq.request.id, {})
        if seq.id not in group or any(rest.target is None for rest in group.values()):
            return 1
        seconds = self._clock() - max(rest.began for rest in group.values())
        num_turns = group[seq.id].num_turns
        due = min(int(seconds * _PACE), self._max_turns + 1) - num_turns
        return min(max(due, 1), _MAX_AT_ONCE)

    def note_decision(self, seq: Sequence, decision: Decision, turns: int = 1) -> str | None:
        """Process an answer that took `turns` turns. Returns the reason why its request can never continue, or None."""
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
        """Return all outputs of the request of `seq` that are not over."""
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
    """Return text that says which output waits for which variable."""
    parts = []
    for rest in group[:_MAX_NAMED]:
        names = " and ".join(repr(name[:_MAX_NAME_CHARS]) for name, _ in rest.target or ())
        parts.append(f"output {rest.seq.index} waits for variable {names}")
    if len(group) > _MAX_NAMED:
        parts.append(f"{len(group) - _MAX_NAMED} more outputs wait likewise")
    return ", ".join(parts)
