"""The work of a replica, as the process around it sees it: a stretch of work, then events.

There are two: `EngineCore` runs the real engine, a step at a time; `QuickCore` is a model of it that skips over steps
in which nothing but decoding happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bridle.distributed.replica_messages import CancelRequest, Submit, WireEvent
from bridle.engine.interfaces import ExecutorInfo


@dataclass(slots=True)
class CoreWork:
    """The work that a core has done, over all its lives. `num_tokens` went through the model."""

    busy_seconds: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    num_preemptions: int = 0


class Core(Protocol):
    """One life of a replica."""

    @property
    def info(self) -> ExecutorInfo: ...

    @property
    def work(self) -> CoreWork: ...

    def take(self, messages: Sequence[Submit | CancelRequest]) -> None:
        """Take the messages that came in since the last stretch began."""

    def begin(self, now: float) -> float | None:
        """Begin a stretch; returns its end, None if there is nothing to do."""
        raise NotImplementedError

    def shorten(self, now: float) -> float | None:
        """Shorten the stretch because a message came in. Returns its earlier end, if it can take the message in before
        its planned end."""
        raise NotImplementedError

    def finish(self) -> list[WireEvent]:
        """End the stretch; returns its events."""
        raise NotImplementedError

    def leave(self, now: float) -> list[WireEvent]:
        """End the life of the replica in the middle of a stretch; returns the events so far that `finish` did not
        return."""
        raise NotImplementedError
