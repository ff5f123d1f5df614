"""Controllers in the making: sequences whose controller is not there yet.

Such a sequence holds no blocks and is in no queue. If it ends meanwhile, the controller is let go as soon as it is
there. A controller may rewrite the prompt, so the sequence begins only when it has spoken. Knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from bridle.engine.intake import Intake
from bridle.engine.interfaces import Ask
from bridle.engine.progress import Progress
from bridle.engine.sequence import Sequence, SequenceStatus
from bridle.engine.steering import Steering, as_controller_error
from bridle.errors import InternalError

_Prompt = Future[tuple[int, ...]]


class Openings:
    """Opens controllers; `begin` is called with each sequence whose prompt is final."""

    def __init__(
        self,
        intake: Intake,
        steering: Steering,
        progress: Progress,
        begin: Callable[[Sequence], None],
        clock: Callable[[], float],
    ) -> None:
        self._intake = intake
        self._steering = steering
        self._progress = progress
        self._begin = begin
        self._clock = clock
        self._waiting: dict[int, tuple[Sequence, _Prompt]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_any_ready(self) -> bool:
        """Whether `take` would begin something."""
        return any(future.done() for _, future in self._waiting.values())

    def open(self, seq: Sequence) -> None:
        """Have the controller of `seq` made."""
        seq.pool = self._steering.pool_for(seq.request.controller)
        if seq.pool is None:
            raise InternalError("a controller was accepted that no pool runs")
        seq.status, seq.opened_at = SequenceStatus.OPENING, self._clock()
        self._waiting[seq.id] = seq, seq.pool.open(seq.request)

    def take(self) -> None:
        """Controllers that are ready: their sequences begin, with the prompt they want."""
        for seq, future in list(self._waiting.values()):
            if seq.is_finished:
                del self._waiting[seq.id]
                _abandon(seq, future)
            elif future.done():
                del self._waiting[seq.id]
                self._begin_controlled(seq, future)

    def _begin_controlled(self, seq: Sequence, future: _Prompt) -> None:
        try:
            prompt = tuple(future.result())
            seq.opening_seconds = self._clock() - (seq.opened_at or 0.0)
            if prompt != seq.request.prompt:
                self._intake.replace_prompt(seq, prompt)
        except Exception as error:
            self._progress.fail(seq, as_controller_error(error))
            _abandon(seq, future)
            return
        self._steering.add(seq, Ask(seq.id, request=seq.request))
        self._begin(seq)
        self._steering.ask()


def _abandon(seq: Sequence, future: _Prompt) -> None:
    """The request ended before its controller was asked anything; its instance may still be in the making."""
    pool, request = seq.pool, seq.request

    def let_go(opened: _Prompt) -> None:
        if pool is not None and not opened.cancelled() and opened.exception() is None:
            pool.abandon(request)

    if not future.cancel():
        future.add_done_callback(let_go)
