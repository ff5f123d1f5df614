"""Base class of pools whose controllers answer at once on the engine's thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from bridle.engine.control.decision import Decision
from bridle.engine.interfaces import Answer, Ask, ControllerPool
from bridle.engine.request import Request

_Instance = TypeVar("_Instance")


class SyncControllerPool(ControllerPool, Generic[_Instance]):
    """A part of a `ControllerPool`. `open` stores a controller in `_opened` by request id. `ask` moves the controller
    to `_live` by sequence id, and fills `_answers`."""

    answers_at_once = True

    def __init__(self) -> None:
        self._opened: dict[str, _Instance] = {}
        self._live: dict[int, _Instance] = {}
        self._answers: dict[int, Answer] = {}

    @property
    def is_empty(self) -> bool:
        """Return whether no request has a controller in this pool."""
        return not (self._opened or self._live or self._answers)

    def abandon(self, request: Request) -> None:
        self._opened.pop(request.id, None)

    def collect(self, seq_ids: Iterable[int], deadline: float | None) -> Mapping[int, Answer]:
        """Return all answers, which are ready as soon as `ask` returns."""
        answers, self._answers = self._answers, {}
        return answers

    def close(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._live.pop(seq_id, None)
            self._answers.pop(seq_id, None)

    def shutdown(self) -> None:
        self._opened.clear()
        self._live.clear()
        self._answers.clear()


def opened(prompt: tuple[int, ...]) -> Future[tuple[int, ...]]:
    """Return a finished future of `prompt`, the result of `open` for a controller that is ready."""
    future: Future[tuple[int, ...]] = Future()
    future.set_result(prompt)
    return future


class NoopPool(SyncControllerPool[None]):
    """Answers every ask at once with "sample". Used in place of a pool whose controller failed and may be left out."""

    def accepts(self, controller: object) -> bool:
        """Return False, because this pool creates no controllers."""
        return False

    def open(self, request: Request) -> Future[tuple[int, ...]]:
        return opened(request.prompt)

    def ask(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            self._answers[ask.seq_id] = Answer(None if ask.final else Decision.sample())
