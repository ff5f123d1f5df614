"""Child processes that compile grammars. Each pool hands its children on, because starting one takes processor time."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any, ClassVar
from unittest.mock import patch

from bridle.structured_output import ConstraintLimits, ConstraintPool
from bridle.structured_output.compile_sandbox import CompileSandbox


class HandedOn(CompileSandbox):
    """A sandbox that hands its idle child processes to the next sandbox. The test process ends idle children by closing
    their standard input."""

    spare: ClassVar[list[Any]] = []
    lending = threading.Lock()

    def __init__(self, limits: ConstraintLimits) -> None:
        super().__init__(limits)
        with self.lending:
            self._running |= {self.spare.pop() for _ in range(min(limits.num_compilers, len(self.spare)))}
        for _ in self._running:
            self._idle.get()
        for child in self._running:
            self._idle.put(child)

    def close(self) -> None:
        """Keep the idle children for the next sandbox, and end the busy ones."""
        resting = []
        with contextlib.suppress(queue.Empty):
            while True:
                resting.append(self._idle.get_nowait())
        with self.lending:
            kept = self._running.intersection(resting)
            self._running -= kept
            self.spare.extend(kept)
        for _ in resting:
            self._idle.put(None)
        super().close()


def thrifty_pool(*args: Any, **options: Any) -> ConstraintPool:
    """Return a `ConstraintPool` whose compiler uses spare children and leaves its own for the next pool."""
    with patch("bridle.structured_output.compiler.CompileSandbox", HandedOn):
        return ConstraintPool(*args, **options)


def end_spare_children() -> None:
    """End the spare children that wait for a next pool."""
    while HandedOn.spare:
        HandedOn.spare.pop().kill()
