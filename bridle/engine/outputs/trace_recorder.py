"""Creates the trace records of traced outputs when their events happen.

An untraced sequence has no `TraceState`. Callers check this before each call, so this module costs untraced sequences
nothing. This module uses no file formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from bridle import traces
from bridle.engine.control.decision import Decision
from bridle.engine.interfaces import Answer, TextDecoder
from bridle.engine.scheduling.scheduler import Scheduled
from bridle.engine.scheduling.step_plan import SampleRow, StepResult
from bridle.engine.sequence import Sequence as Output
from bridle.engine.sequence_state import NO_DRAW, TraceBudget, TraceState
from bridle.outputs import TOKEN_KINDS, Finished, Traced


class TraceRecorder:
    """Records the events of outputs that have a `TraceState`. All methods are for traced outputs only. `emit` receives
    the events with the records.

    `num_live` is the number of requests that are traced now; `num_live_records` is the number of their records. The
    engine reports its steps only while a request is traced. `num_records` is the number of records made so far.
    `num_cut` is the number of records that were dropped, because one request or all requests together had too many.
    """

    def __init__(self, emit: Callable[[Traced], None], decoder: TextDecoder | None) -> None:
        self._emit = emit
        self._decoder = decoder
        self.num_live = 0
        self.num_live_records = self.num_cut = 0
        self._num_over = 0  # records of ended requests
        self._step = 0
        self._cost: traces.Cost | None = None

    @property
    def num_records(self) -> int:
        return self._num_over + self.num_live_records

    # -- requests and steps ------------------------------------------------------------------------------

    def begin(self, seq: Output) -> None:
        """Begin to trace the first sequence of a request."""
        self.num_live += 1
        seq.trace = TraceState(TraceBudget(), seq.request.controller_name)

    def begin_step(self, step: int) -> None:
        """Record that a step begins. Tokens that were forced before the step's forward pass have no recorded cost."""
        self._step, self._cost = step, None

    def compute(self, scheduled: Sequence[Scheduled], num_tokens: int, times: Sequence[float]) -> None:
        """Record the work of a step and its times: before and after the forward pass, after control, and after
        sampling. The recorded work and times are the cost of the step's tokens."""
        began, computed, steered, sampled = times
        self._cost = traces.Cost(len(scheduled), num_tokens, computed - began, steered - computed, sampled - steered)
        for item in scheduled:
            seq = item.seq
            trace = seq.trace
            if trace is None:
                continue
            start, end = item.row.start, item.end
            if end - start == 1 and start >= trace.num_seen and end == len(seq.tokens):
                trace.num_seen = end  # the usual case: the record of the sampled token is enough
            elif not seq.is_finished:  # the output may have failed meanwhile
                self._chunk(item, trace)

    def _chunk(self, item: Scheduled, trace: TraceState) -> None:
        start, end = item.row.start, item.end
        num_again = max(min(end, trace.num_seen) - start, 0)
        trace.num_seen = max(trace.num_seen, end)
        if end - start > 1 or num_again or end < len(item.seq.tokens):
            self._add(
                item.seq, traces.ChunkRecord(item.seq.index, self._step, start, end - start, num_again, self._cost)
            )

    # -- tokens ------------------------------------------------------------------------------------------

    def drawn(self, seq: Output, row: SampleRow, result: StepResult, number: int, *, is_draft: bool) -> None:
        """Record the distribution from which the next token is sampled."""
        _traced(seq).drawn = row.bias, is_draft, result.draws, number

    def token(self, seq: Output, token: int, text: str, *, forced: bool) -> None:
        """Record a token that was just appended."""
        trace, request, index = _traced(seq), seq.request, seq.index
        if not self._has_room(trace.room):
            return
        decoder = self._decoder if request.detokenize else None
        at = len(seq.tokens) - seq.num_prompt - 1
        made: traces.Later  # one flat tuple, which costs the garbage collector little
        if forced:
            made = _forced_token, decoder, index, self._step, at, token, text, trace.by, trace.answered
        else:
            drawn, trace.drawn = trace.drawn, NO_DRAW
            made = _drawn_token, decoder, index, self._step, at, token, text, *drawn, trace.answered, self._cost
        trace.answered = 0.0
        self._emit(Traced(request.id, index, made))

    def replaced(self, seq: Output, token: int) -> None:
        """Record a sampled token that a splice replaces."""
        trace = _traced(seq)
        _, _, draws, number = trace.drawn
        draw = _draw_of(self._decoder if seq.request.detokenize else None, draws, number)
        self._add(seq, traces.ReplacedRecord(seq.index, self._step, token, self._spell(seq, token), trace.by, draw))
        trace.drawn = NO_DRAW

    def rewind(self, seq: Output, num_tokens: int, num_chars: int, num_prompt: int = 0) -> None:
        """Record that tokens and characters were rolled back."""
        trace = _traced(seq)
        trace.num_seen = min(trace.num_seen, len(seq.tokens))
        self._add(seq, traces.RewindRecord(seq.index, self._step, num_tokens, num_chars, num_prompt, trace.by))

    def prompt(self, seq: Output) -> None:
        """Record that the prompt was computed."""
        if not self._has_room(_traced(seq).room):
            return
        decoder = self._decoder if seq.request.detokenize else None
        tokens, cached = seq.tokens[: seq.num_prompt], seq.output.usage.cached_tokens
        seconds = seq.queue.seconds or 0.0, seq.control.opening_seconds
        self._emit(
            Traced(seq.request.id, seq.index, (_prompt, decoder, seq.index, self._step, tokens, cached, *seconds))
        )

    def fork(self, parent: Output, child: Output) -> None:
        """Record a new output."""
        self._add(child, traces.ForkRecord(child.index, self._step, parent.index, parent.num_generated))

    def end(self, seq: Output, event: Finished) -> None:
        """Record the end of an output."""
        trace = _traced(seq)
        self._end_wait(seq, trace)
        error = None if event.error is None else f"{event.error.code}: {event.error}"
        usage = {name: getattr(event.usage, name) for name in TOKEN_KINDS.values()}
        record = traces.EndRecord(seq.index, self._step, event.reason.value, event.text, event.stop, error, usage)
        record.constraint = event.usage.constraint_fields().get("constraint")
        record.num_cut, record.modules = trace.room.num_cut, trace.modules
        self._emit(Traced(seq.request.id, seq.index, record))
        if event.is_last:
            self.num_live -= 1
            self.num_live_records -= trace.room.num_records
            self._num_over += trace.room.num_records

    # -- controllers -------------------------------------------------------------------------------------

    def opened(self, seq: Output) -> None:
        """Record the modules that the names of the controllers stand for."""
        pool = seq.control.pool
        _traced(seq).modules = pool.modules_of(seq.request) if pool is not None else ()

    def asked(self, seq: Output, now: float) -> None:
        """Record that the controller was asked for a decision."""
        _traced(seq).asked_at = now

    def heard(self, seq: Output, answer: Answer, now: float) -> None:
        """Record an answer of the controller, with its logs and variables."""
        trace = _traced(seq)
        if trace.asked_at is not None:
            trace.answered += now - trace.asked_at
            trace.asked_at = None
        for record in self._said(seq, answer):
            trace.room.num_said -= _size(record)
            if trace.room.num_said < 0:
                self._cut(trace.room)
            else:
                self._add(seq, record)

    def _said(self, seq: Output, answer: Answer) -> list[traces.LogRecord | traces.StoredRecord]:
        wrote: list[traces.LogRecord | traces.StoredRecord] = [
            traces.StoredRecord(seq.index, self._step, *stored) for stored in answer.stored
        ]
        return [traces.LogRecord(seq.index, self._step, answer.log), *wrote] if answer.log else wrote

    def held(self, seq: Output, decision: Decision | None, now: float) -> None:
        """Record another step in which the output waits for its controller: the controller decided to wait, or it is
        late."""
        trace = _traced(seq)
        if trace.wait is None:
            names = () if decision is None else tuple(name for name, _ in decision.waits_for or ())
            trace.wait, trace.waits_since = traces.WaitRecord(seq.index, self._step, decision is None, names), now
        trace.wait.num_steps += 1
        trace.wait.seconds = now - trace.waits_since

    def resumed(self, seq: Output, now: float) -> None:
        """Record the end of the output's wait, if the output was waiting."""
        trace = _traced(seq)
        if trace.wait is not None:
            trace.wait.seconds = now - trace.waits_since
            self._end_wait(seq, trace)

    def _end_wait(self, seq: Output, trace: TraceState) -> None:
        wait, trace.wait = trace.wait, None
        if wait is not None:
            self._add(seq, wait)

    # -- helpers -----------------------------------------------------------------------------------------

    def _add(self, seq: Output, record: traces.Record) -> None:
        if self._has_room(_traced(seq).room):
            self._emit(Traced(seq.request.id, seq.index, record))

    def _has_room(self, room: TraceBudget) -> bool:
        """Reserve room for one more record. Returns whether the limits leave room for the record."""
        if room.num_records >= room.most_records or self.num_live_records >= traces.MAX_LIVE_RECORDS:
            self._cut(room)
            return False
        room.num_records += 1
        self.num_live_records += 1
        return True

    def _cut(self, room: TraceBudget) -> None:
        room.num_cut += 1
        self.num_cut += 1

    def _spell(self, seq: Output, token: int) -> str:
        return self._decoder.token_text(token) if self._decoder is not None and seq.request.detokenize else ""


# -- records are made when they are read; a step only notes their parts ------------------------------------


def _prompt(
    decoder: TextDecoder | None,
    output: int,
    step: int,
    tokens: list[int],
    num_cached: int,
    queued: float,
    opening: float,
) -> traces.PromptRecord:
    texts = [_spelled(decoder, token) for token in tokens]
    return traces.PromptRecord(output, step, tokens, texts, num_cached, queued, opening)


def _forced_token(
    decoder: TextDecoder | None, output: int, step: int, at: int, token: int, text: str, by: str | None, answer: float
) -> traces.TokenRecord:
    return traces.TokenRecord(output, step, at, token, text, _spelled(decoder, token), True, by, answer=answer)


def _drawn_token(
    decoder: TextDecoder | None,
    output: int,
    step: int,
    at: int,
    token: int,
    text: str,
    bias: tuple[tuple[int, float], ...],
    is_draft: bool,
    draws: Sequence[traces.Draw | None],
    number: int,
    answer: float,
    cost: traces.Cost | None,
) -> traces.TokenRecord:
    told = tuple([(each, None if math.isinf(addend) else addend) for each, addend in bias[: traces.MAX_BIASES]])
    draw, spelled = _draw_of(decoder, draws, number), _spelled(decoder, token)
    return traces.TokenRecord(
        output, step, at, token, text, spelled, False, None, is_draft, draw, told, len(bias), answer, cost
    )


def _draw_of(decoder: TextDecoder | None, draws: Sequence[traces.Draw | None], number: int) -> traces.Draw | None:
    draw = draws[number] if draws else None
    if draw is not None and decoder is not None:
        for odds in (draw.before, draw.after):
            if odds is not None:
                odds.texts = tuple([decoder.token_text(token) for token, _ in odds.top])
    return draw


def _spelled(decoder: TextDecoder | None, token: int) -> str:
    return "" if decoder is None else decoder.token_text(token)


def _traced(seq: Output) -> TraceState:
    assert seq.trace is not None
    return seq.trace


def _size(record: traces.LogRecord | traces.StoredRecord) -> int:
    return len(record.text) if isinstance(record, traces.LogRecord) else len(record.name) + len(record.value)
