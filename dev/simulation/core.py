"""Interface of a replica's work for the process around it: a stretch of work, then events.

There are two implementations. `EngineCore` runs the real engine, a step at a time. `QuickCore` is a model of the engine
that skips steps in which all sequences only decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bridle.distributed.replica_messages import CancelRequest, Submit, WireEvent
from bridle.engine.interfaces import ExecutorInfo


@dataclass(slots=True)
class CoreWork:
    """The work that a core has done, over all its lives. `num_tokens` is the number of tokens that the model
    computed."""

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
        """Handle the messages that arrived since the last stretch began."""

    def begin(self, now: float) -> float | None:
        """Begin a stretch of work; return its end, or None if there is no work."""
        raise NotImplementedError

    def shorten(self, now: float) -> float | None:
        """Shorten the stretch because a message arrived. Return its earlier end, if it can handle the message before
        its planned end."""
        raise NotImplementedError

    def finish(self) -> list[WireEvent]:
        """End the stretch; return its events."""
        raise NotImplementedError

    def leave(self, now: float) -> list[WireEvent]:
        """End the life of the replica in the middle of a stretch. Return the events so far that `finish` did not
        return."""
        raise NotImplementedError
