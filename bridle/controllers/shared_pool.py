"""A pool that both the engine and the composed pool use. Answers are kept separately for each of the two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bridle.engine.interfaces import Answer, ControllerPool, DelegatingPool

#: First sequence number of members of composed controllers. The engine's own numbers are all smaller.
FIRST_PART = 1 << 48


class SharedPool(DelegatingPool):
    """A pool that both the engine and the composed pool use, with separate answers for each."""

    def __init__(self, pool: ControllerPool) -> None:
        super().__init__(pool)
        self._answers: dict[int, Answer] = {}  # for the engine
        self._parts: dict[int, Answer] = {}  # for the composed pool
        self.num_composed = 0  # live requests of the composed pool

    @property
    def is_busy(self) -> bool:
        """Return whether the pool is busy or kept answers wait."""
        return self._pool.is_busy or bool(self._answers)

    def close(self, seq_ids: Sequence[int]) -> None:
        """Drop the answers of these sequences too."""
        for seq_id in seq_ids:
            (self._parts if seq_id >= FIRST_PART else self._answers).pop(seq_id, None)
        self._pool.close(seq_ids)

    def collect(self, seq_ids: Iterable[int], deadline: float | None) -> Mapping[int, Answer]:
        if not (self.num_composed or self._answers):
            return self._pool.collect(seq_ids, deadline)
        self._fetch([seq_id for seq_id in seq_ids if seq_id not in self._answers], deadline)
        answers, self._answers = self._answers, {}
        return answers

    def take_parts(self, seq_ids: Sequence[int], deadline: float | None, *, may_ask: bool) -> Mapping[int, Answer]:
        """Return the answers for the composed pool: those that were kept, or, if there are none and `may_ask` is true,
        new ones from the pool."""
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
