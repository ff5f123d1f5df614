"""The pool of controllers that want nothing: it stands in for one that failed and may be left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future

from bridle.engine.decision import Decision
from bridle.engine.interfaces import Answer, Ask
from bridle.engine.request import Request


class NeutralPool:
    """Answers every ask at once: to draw."""

    is_busy = False
    answers_at_once = True

    def __init__(self) -> None:
        self._answers: dict[int, Answer] = {}

    def accepts(self, controller: object) -> bool:
        """None is made here."""
        return False

    def open(self, request: Request) -> Future[tuple[int, ...]]:
        """Nothing has to be made."""
        future: Future[tuple[int, ...]] = Future()
        future.set_result(request.prompt)
        return future

    def abandon(self, request: Request) -> None:
        """There is nothing to drop."""

    def ask(self, asks: Sequence[Ask]) -> None:
        """Answer."""
        for ask in asks:
            self._answers[ask.seq_id] = Answer(None if ask.final else Decision.sample())

    def collect(self, seq_ids: Iterable[int], deadline: float | None) -> Mapping[int, Answer]:
        """All answers."""
        answers, self._answers = self._answers, {}
        return answers

    def close(self, seq_ids: Sequence[int]) -> None:
        """Drop the answers for these."""
        for seq_id in seq_ids:
            self._answers.pop(seq_id, None)

    def shutdown(self) -> None:
        """Drop everything."""
        self._answers.clear()
