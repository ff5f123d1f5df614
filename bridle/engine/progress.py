"""What a step does to the sequences, and the events that tell of it.

Appends sampled and forced tokens, takes tokens back, checks the stopping criteria, fills in log-probabilities, ends
outputs. All changes to a sequence's tokens go through here, so this is where the counts are kept. It knows nothing
of controllers and devices.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from bridle.engine.interfaces import TextDecoder
from bridle.engine.output_text import OutputText
from bridle.engine.scheduler import Scheduler
from bridle.engine.sequence import Sequence, SequenceStatus, UnsentToken
from bridle.engine.statistics import EngineStatistics
from bridle.errors import BridleError, InvalidRequest
from bridle.outputs import Embedded, Event, Finished, FinishReason, Forked, Logprob, PromptEvent, Rewind, TokenEvent

#: Endings that happen at once, whatever is still owed to the client.
_ABRUPT = frozenset({FinishReason.ERROR, FinishReason.CANCELLED, FinishReason.DEADLINE})


class Progress:
    """Changes sequences and collects the events of the step under way.

    `on_finish(seq, event)` takes each `Finished` event: the engine decides when it goes out.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        statistics: EngineStatistics,
        decoder: TextDecoder | None,
        on_finish: Callable[[Sequence, Finished], None],
    ) -> None:
        self._scheduler = scheduler
        self._statistics = statistics
        self._decoder = decoder
        self._on_finish = on_finish
        self.events: list[Event] = []

    # -- tokens ------------------------------------------------------------------------------------------

    def open_text(self, seq: Sequence) -> None:
        """Start the text of a sequence that has generated nothing yet."""
        if self._decoder is None or not seq.request.detokenize:
            return
        state = self._decoder.open(seq.tokens, seq.sampling.skip_special_tokens)
        seq.text = OutputText(state, seq.sampling.stop, seq.sampling.include_stop_str_in_output)

    def take_over(self, seq: Sequence, tokens: tuple[int, ...]) -> None:
        """The output was drawn so far on another engine, and its client knows that: no events."""
        for token in tokens:
            seq.append(token)
            if seq.text is not None:
                seq.text.push(token)
        seq.num_draws = seq.usage.sampled_tokens = len(tokens)
        seq.num_scored = len(seq.tokens)
        seq.prompt_sent = True

    def append(self, seq: Sequence, token: int, logprob: Logprob | None = None, *, forced: bool) -> bool:
        """One more token; True if it ends the output."""
        seq.append(token)
        self._count(seq, forced)
        text, stop, num_taken = seq.text.push(token) if seq.text else ("", None, 0)
        if not forced and seq.sampling.logprobs is not None:
            seq.num_scored = len(seq.tokens)
        if seq.prompt_sent and (not forced or seq.sampling.logprobs is None):
            self._emit_token(seq, token, text, self._spelled(seq, logprob), forced)
        else:
            seq.unsent.append(UnsentToken(token, text, forced))
        if num_taken:
            self.events.append(Rewind(seq.request.id, seq.index, 0, num_taken))
        return self._check_stop(seq, stop)

    def _count(self, seq: Sequence, forced: bool) -> None:
        if forced:
            seq.usage.forced_tokens += 1
            self._statistics.num_forced_tokens += 1
        else:
            seq.usage.sampled_tokens += 1
            self._statistics.num_sampled_tokens += 1

    def _emit_token(self, seq: Sequence, token: int, text: str, logprob: Logprob | None, forced: bool) -> None:
        self.events.append(TokenEvent(seq.request.id, seq.index, token, text, logprob, forced))

    def count_replaced(self, seq: Sequence) -> None:
        """A token was drawn, but a splice replaced it before it entered the sequence."""
        self._count(seq, forced=False)
        seq.usage.rewound_tokens += 1
        self._statistics.num_rewound_tokens += 1

    def rewind(self, seq: Sequence, num_tokens: int) -> None:
        """Take the last `num_tokens` tokens back, prompt tokens too if it must be."""
        if num_tokens == 0:
            return
        num_generated = min(num_tokens, seq.num_generated)
        num_unsent = min(num_generated, len(seq.unsent))
        dropped = seq.unsent[len(seq.unsent) - num_unsent :]
        del seq.unsent[len(seq.unsent) - num_unsent :]
        seq.cut(len(seq.tokens) - num_tokens)
        self._scheduler.rewound(seq)
        num_chars = 0
        if seq.text is not None:
            num_chars = seq.text.rewind(num_generated, sum(len(item.text) for item in dropped))
            if num_tokens > num_generated:
                self.open_text(seq)
        seq.usage.rewound_tokens += num_generated
        self._statistics.num_rewound_tokens += num_generated
        if num_generated > num_unsent or num_chars:
            self.events.append(Rewind(seq.request.id, seq.index, num_generated - num_unsent, num_chars))

    def force(self, seq: Sequence, tokens: Iterable[int]) -> bool:
        """Append tokens that were not drawn; True if the output ended, in which case the rest is dropped."""
        return any(self.append(seq, token, forced=True) for token in tokens)

    # -- log-probabilities -------------------------------------------------------------------------------

    def add_scores(self, seq: Sequence, scores: list[Logprob]) -> None:
        """Log-probabilities of the tokens from `num_scored` on became known."""
        for bare in scores:
            score = self._spelled(seq, bare)
            if seq.num_scored < seq.num_prompt:
                seq.prompt_logprobs.append(score)
            elif seq.unsent:
                item = seq.unsent.pop(0)
                self._emit_token(seq, item.token, item.text, score, item.forced)
            seq.num_scored += 1
            if seq.num_scored == seq.num_prompt:
                self._emit_prompt(seq)

    def _spelled(self, seq: Sequence, logprob: Logprob | None) -> Logprob | None:
        if logprob is None or self._decoder is None or not seq.request.detokenize:
            return logprob
        return logprob.spelled(self._decoder.token_text)

    def note_prompt(self, seq: Sequence) -> None:
        """The prompt was computed; tell the client, unless its scores are still to come."""
        if not seq.prompt_sent and not (seq.sampling.prompt_logprobs is not None and seq.num_scored < seq.num_prompt):
            self._emit_prompt(seq)

    def _emit_prompt(self, seq: Sequence) -> None:
        if seq.prompt_sent:
            return
        seq.prompt_sent = True
        logprobs: tuple[Logprob | None, ...] = ()
        if seq.sampling.prompt_logprobs is not None:
            logprobs = (*[None] * (seq.num_prompt - len(seq.prompt_logprobs)), *seq.prompt_logprobs)
        prompt = tuple(seq.tokens[: seq.num_prompt])
        self.events.append(
            PromptEvent(
                seq.request.id,
                seq.index,
                prompt,
                seq.usage.cached_tokens,
                logprobs,
                queued=seq.queue_seconds or 0.0,
                opening=seq.opening_seconds,
            )
        )
        if seq.sampling.logprobs is None:
            self._flush_unsent(seq)

    def _flush_unsent(self, seq: Sequence) -> None:
        for item in seq.unsent:
            self._emit_token(seq, item.token, item.text, None, item.forced)
        seq.unsent.clear()

    # -- endings -----------------------------------------------------------------------------------------

    def _check_stop(self, seq: Sequence, stop_string: str | None) -> bool:
        try:
            stop = self._find_stop(seq, stop_string)
        except Exception as error:  # a criterion of the user's own failed: its request, not the engine's
            self.fail(seq, InvalidRequest(f"a stopping criterion raised {error!r}", "stopping_criteria"))
            return True
        if stop is None:
            return False
        if stop is FinishReason.LENGTH:
            self.finish(seq, FinishReason.LENGTH)
        else:
            self.finish(seq, FinishReason.STOP, stop)
        return True

    def _find_stop(self, seq: Sequence, stop_string: str | None) -> int | str | None:
        tokens, num_prompt = seq.tokens, seq.num_prompt
        if tokens[-1] in seq.stop_ids:
            return tokens[-1]
        if stop_string is not None:
            return stop_string
        for criterion in seq.stopping:
            if (stop := criterion(tokens, num_prompt)) is not None:
                return stop
        return None

    def finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        stop: int | str | None = None,
        error: BridleError | None = None,
    ) -> None:
        """End the output: now, or once the scores that are still owed are known."""
        if seq.is_finished:
            return
        if reason not in _ABRUPT and seq.wants_scores:
            seq.ending = reason, stop
            seq.is_late = seq.is_suspended = False
            seq.clamp_computed()
            return
        if not seq.prompt_sent and reason not in _ABRUPT:
            self._emit_prompt(seq)
        if reason in _ABRUPT or seq.sampling.logprobs is None:
            self._flush_unsent(seq)
        tail = seq.text.flush() if seq.text is not None else ""
        seq.usage.completion_tokens = seq.num_generated
        self._scheduler.remove(seq)
        seq.status = SequenceStatus.FINISHED
        self._statistics.finished[reason.value] += 1
        event = Finished(seq.request.id, seq.index, reason, seq.usage, tail, stop, error, held=seq.held_seconds)
        self._on_finish(seq, event)

    def embed(self, seq: Sequence, vector: array[float]) -> None:
        """The prompt is computed and this is what became of it, which is all that was wanted."""
        self.events.append(Embedded(seq.request.id, seq.index, vector))
        self.finish(seq, FinishReason.STOP)

    def settle(self, seq: Sequence) -> None:
        """End an output that only waited for its scores."""
        if seq.ending is not None and not seq.wants_scores:
            reason, stop = seq.ending
            self.finish(seq, reason, stop)

    def fail(self, seq: Sequence, error: BridleError) -> None:
        """End the output with an error."""
        self.finish(seq, FinishReason.ERROR, error=error)

    def announce_fork(self, parent: Sequence, child: Sequence) -> None:
        """Tell of a new output, before anything happens to it."""
        self._statistics.num_forks += 1
        text = parent.text.released_text() if parent.text else ""
        self.events.append(Forked(child.request.id, child.index, parent.index, parent.num_generated, text))

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events
