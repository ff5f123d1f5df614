"""Child processes that try grammars. Pools pass them on to the next pool, because starting one takes processor time."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any, ClassVar
from unittest.mock import patch

from bridle.structured_output import ConstraintLimits, ConstraintPool
from bridle.structured_output.compile_sandbox import CompileSandbox


class HandedOn(CompileSandbox):
    """A sandbox whose idle children serve the next one. They end with this process, which closes their input."""

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
        """Keep the children that rest, end those that work."""
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
    """A `ConstraintPool` whose compiler takes over children and leaves them."""
    with patch("bridle.structured_output.compiler.CompileSandbox", HandedOn):
        return ConstraintPool(*args, **options)


def end_spare_children() -> None:
    """End those that wait for a pool."""
    while HandedOn.spare:
        HandedOn.spare.pop().kill()
