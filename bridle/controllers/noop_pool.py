"""The pool of controllers that do nothing: it replaces one that failed and may be left out."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from bridle.controllers.sync_pool import SyncControllerPool, opened
from bridle.engine.control.decision import Decision
from bridle.engine.interfaces import Answer, Ask
from bridle.engine.request import Request


class NoopPool(SyncControllerPool[None]):
    """Answers every ask at once with "sample"."""

    def accepts(self, controller: object) -> bool:
        """Return False: no controller is created here."""
        return False

    def open(self, request: Request) -> Future[tuple[int, ...]]:
        return opened(request.prompt)

    def ask(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            self._answers[ask.seq_id] = Answer(None if ask.final else Decision.sample())
