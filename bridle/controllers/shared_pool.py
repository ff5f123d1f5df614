"""A pool that both the engine and the composed pool ask. A pool hands over whatever answers it has, so this keeps apart
whose they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future

from bridle.engine.control.decision import Decision
from bridle.engine.interfaces import (
    Answer,
    Ask,
    ControllerPool,
    ModulePool,
    SupportsDraftFiltering,
    SupportsDraftMasks,
    SupportsLookahead,
    SupportsRemoteLookahead,
)
from bridle.engine.request import Request

#: The sequences of composed controllers have numbers from here on, above all of the engine's.
FIRST_PART = 1 << 48


class SharedPool:
    """A pool that the engine and the composed pool both ask."""

    def __init__(self, pool: ControllerPool) -> None:
        self._pool = pool
        self._answers: dict[int, Answer] = {}  # for the engine
        self._parts: dict[int, Answer] = {}  # for the composed pool
        self.num_composed = 0  # live requests of the composed pool
        self.answers_at_once: bool = getattr(pool, "answers_at_once", False)

    @property
    def is_busy(self) -> bool:
        """As the pool is; answers that were kept are to be fetched, too."""
        return self._pool.is_busy or bool(self._answers)

    def accepts(self, controller: object) -> bool:
        """As the pool does."""
        return self._pool.accepts(controller)

    def open(self, request: Request) -> Future[tuple[int, ...]]:
        """As the pool does."""
        return self._pool.open(request)

    def modules_of(self, request: Request) -> tuple[tuple[str, str], ...]:
        """As the pool does, if it knows modules."""
        return self._pool.modules_of(request) if isinstance(self._pool, ModulePool) else ()

    def abandon(self, request: Request) -> None:
        """As the pool does."""
        self._pool.abandon(request)

    def ask(self, asks: Sequence[Ask]) -> None:
        """As the pool does."""
        self._pool.ask(asks)

    def close(self, seq_ids: Sequence[int]) -> None:
        """As the pool does."""
        for seq_id in seq_ids:
            (self._parts if seq_id >= FIRST_PART else self._answers).pop(seq_id, None)
        self._pool.close(seq_ids)

    def shutdown(self) -> None:
        """As the pool does."""
        self._pool.shutdown()

    def collect(self, seq_ids: Iterable[int], deadline: float | None) -> Mapping[int, Answer]:
        """The answers for the engine."""
        if not (self.num_composed or self._answers):
            return self._pool.collect(seq_ids, deadline)
        self._fetch([seq_id for seq_id in seq_ids if seq_id not in self._answers], deadline)
        answers, self._answers = self._answers, {}
        return answers

    def take_parts(self, seq_ids: Sequence[int], deadline: float | None, *, may_ask: bool) -> Mapping[int, Answer]:
        """The answers for the composed pool: those that were kept, or else, if it `may_ask`, those of the pool."""
        if may_ask and not self._parts:
            self._fetch(seq_ids, deadline)
        answers, self._parts = self._parts, {}
        return answers

    def _fetch(self, seq_ids: Sequence[int], deadline: float | None) -> None:
        answers = self._pool.collect(seq_ids, deadline if seq_ids else None)
        if not self._parts and answers and min(answers) >= FIRST_PART:  # the usual case
            self._parts = dict(answers)
            return
        for seq_id, answer in answers.items():
            (self._parts if seq_id >= FIRST_PART else self._answers)[seq_id] = answer


class ForesightedSharedPool(SharedPool):
    """One that can say ahead what it would answer."""

    def lookahead(self, seq_id: int, tokens: Sequence[int]) -> list[Decision]:
        """As the pool does."""
        assert isinstance(self._pool, SupportsLookahead)
        return self._pool.lookahead(seq_id, tokens)

    def take_lookahead_output(self, seq_id: int, num_tokens: int) -> Answer | None:
        """As the pool does."""
        assert isinstance(self._pool, SupportsLookahead)
        return self._pool.take_lookahead_output(seq_id, num_tokens)


class GuidingSharedPool(ForesightedSharedPool):
    """One that says how drafts are to be drawn."""

    def draft_decision(self, seq_id: int, tokens: Sequence[int]) -> Decision | None:
        """As the pool does."""
        assert isinstance(self._pool, SupportsDraftMasks)
        return self._pool.draft_decision(seq_id, tokens)


class LeadingSharedPool(GuidingSharedPool):
    """One that says which tokens may be drafted."""

    def filter_draft(self, seq_id: int, tokens: Sequence[int]) -> tuple[list[tuple[int, ...]], bool]:
        """As the pool does."""
        assert isinstance(self._pool, SupportsDraftFiltering)
        return self._pool.filter_draft(seq_id, tokens)


class ForetoldSharedPool(ForesightedSharedPool):
    """One that says so of what it was told ahead."""

    @property
    def is_told_ahead(self) -> bool:
        """As the pool says."""
        return isinstance(self._pool, SupportsRemoteLookahead) and self._pool.is_told_ahead


def shared(pool: ControllerPool) -> SharedPool:
    """The pool for two askers, with all that it can do."""
    if isinstance(pool, SupportsRemoteLookahead):
        return ForetoldSharedPool(pool)
    if isinstance(pool, SupportsDraftFiltering):
        return LeadingSharedPool(pool)
    if isinstance(pool, SupportsDraftMasks):
        return GuidingSharedPool(pool)
    return ForesightedSharedPool(pool) if isinstance(pool, SupportsLookahead) else SharedPool(pool)
