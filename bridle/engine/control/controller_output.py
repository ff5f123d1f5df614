"""Logs and variables of controllers, and the output of a controller's last call.

The `Finished` event of an output with a controller waits for the controller's last logs, at most `LAST_WORDS` seconds.
Policies apply to logs and variables as they apply to outputs.
"""

from __future__ import annotations

from collections.abc import Callable

from bridle.engine.guardrails.guardrails import Guardrails
from bridle.engine.interfaces import Answer, StoredValue
from bridle.engine.outputs.output_processor import OutputProcessor
from bridle.engine.sequence import Sequence
from bridle.outputs import Finished, FinishReason, Log, Stored

#: Maximum number of seconds for which the end of an output waits for its controller's last log.
LAST_WORDS = 0.25


class ControllerOutputs:
    """Sends logs and variables of controllers to clients; `emit` sends the `Finished` events that were held back."""

    def __init__(
        self, progress: OutputProcessor, clock: Callable[[], float], emit: Callable[[Sequence, Finished], None]
    ) -> None:
        self._progress = progress
        self._clock = clock
        self._emit = emit
        self.held: dict[int, tuple[Sequence, Finished, float]] = {}  # ended; the last logs are due
        self.pending_final_asks: list[Sequence] = []  # ended; no final ask was sent yet

    def tell(self, seq: Sequence, answer: Answer) -> None:
        """Send the log and the variables of an answer."""
        if answer.log and (log := _log_of(seq, answer.log)):
            self._progress.events.append(Log(seq.request.id, seq.index, log))
        for stored in answer.stored:
            self._progress.events.append(Stored(seq.request.id, seq.index, *_held_to(seq.request.guard, stored)))

    def hold(self, seq: Sequence, event: Finished) -> bool:
        """Hold back the `Finished` event of an output, if its controller may still send logs. Returns True if the event
        is held back."""
        control = seq.control
        if control.pool is None:
            return False
        is_silent = control.final_ask_sent and not control.awaits_answer
        if is_silent or event.reason in (FinishReason.CANCELLED, FinishReason.DEADLINE):
            control.pool.close([seq.id])
            return False
        if not control.final_ask_sent:
            self.pending_final_asks.append(seq)
        self.held[seq.id] = seq, event, self._clock() + LAST_WORDS
        return True

    def hear(self, seq_id: int, answer: Answer) -> None:
        """Process an answer of a controller whose output has ended."""
        held = self.held.pop(seq_id, None)
        if held is not None:
            if held[0].trace is not None:
                self._progress.tracer.heard(held[0], answer, self._clock())
            self.tell(held[0], answer)
            self._let_go(held[0], held[1])

    def release_overdue(self) -> None:
        """Send the held-back events whose waiting time has ended."""
        now = self._clock()
        for seq_id, (seq, event, deadline) in list(self.held.items()):
            if now >= deadline:
                del self.held[seq_id]
                self._let_go(seq, event)

    def _let_go(self, seq: Sequence, event: Finished) -> None:
        self._emit(seq, event)
        if seq.control.pool is not None:
            seq.control.pool.close([seq.id])


def _log_of(seq: Sequence, log: str) -> str:
    """Return the part of a log that the policies permit, by the same rules as for an output."""
    guard = seq.request.guard
    if guard is None:
        return log
    log = guard.clean(log, seq.control.log_tail)
    seq.control.log_tail = guard.tail(seq.control.log_tail + log)
    return log


def _held_to(guard: Guardrails | None, stored: StoredValue) -> StoredValue:
    """Return a variable without text that a policy forbids."""
    text = "" if guard is None else stored.value.decode("utf-8", "replace")
    if guard is None or (cleaned := guard.clean(text)) == text:
        return stored
    return stored._replace(value=cleaned.encode())
