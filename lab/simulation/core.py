"""What a replica does with its time, as the process around it sees it: a stretch of work, then news.

There are two: `EngineCore` runs the real engine, a step at a time; `QuickCore` is a model of it that skips over steps
in which nothing but decoding happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bridle.cluster.replica_messages import Cancel, Submit, WireEvent
from bridle.engine.interfaces import ExecutorInfo


@dataclass(slots=True)
class Work:
    """What a core has done, over all its lives. `num_tokens` went through the model."""

    busy_seconds: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    num_preemptions: int = 0


class Core(Protocol):
    """One life of a replica."""

    @property
    def info(self) -> ExecutorInfo: ...

    @property
    def work(self) -> Work: ...

    def take(self, messages: Sequence[Submit | Cancel]) -> None:
        """What came in since the last stretch began."""

    def begin(self, now: float) -> float | None:
        """Begin a stretch; gives its end, None if there is nothing to do."""
        raise NotImplementedError

    def shorten(self, now: float) -> float | None:
        """Something came in: the earlier end of the stretch, if it can take that in before its planned end."""
        raise NotImplementedError

    def finish(self) -> list[WireEvent]:
        """The stretch is over: what came of it."""
        raise NotImplementedError

    def leave(self, now: float) -> list[WireEvent]:
        """The replica is lost in the middle of everything: what it has said until now and `finish` did not give."""
        raise NotImplementedError
