"""Interface between a replica's work and the process around it: a stretch of work, then its events.

There are two implementations. `EngineCore` runs the real engine, a step at a time. `QuickCore` is a model of the engine
that skips over steps in which all sequences only decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bridle.distributed.replica_messages import CancelRequest, Submit, WireEvent
from bridle.engine.interfaces import ExecutorInfo


@dataclass(slots=True)
class CoreWork:
    """The total work of a replica, over all lives of its process. `num_tokens` is the number of tokens that the model
    computed."""

    busy_seconds: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    num_preemptions: int = 0


class Core(Protocol):
    """The engine in one life of a replica's process."""

    @property
    def info(self) -> ExecutorInfo: ...

    @property
    def work(self) -> CoreWork: ...

    def take(self, messages: Sequence[Submit | CancelRequest]) -> None:
        """Handle the messages that arrived after the last stretch began."""

    def begin(self, now: float) -> float | None:
        """Begin a stretch of work at the time `now`; return its end, or None if there is no work."""
        raise NotImplementedError

    def shorten(self, now: float) -> float | None:
        """Shorten the stretch because a message arrived. Return its new end if the core can handle the message before
        the planned end, otherwise None."""
        raise NotImplementedError

    def finish(self) -> list[WireEvent]:
        """End the stretch; return its events."""
        raise NotImplementedError

    def leave(self, now: float) -> list[WireEvent]:
        """End the process's life in the middle of a stretch. Return the events of the stretch so far, which `finish`
        did not return."""
        raise NotImplementedError
