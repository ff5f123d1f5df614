"""Applies the results of a step to the sequences, and creates the events that report them.

The output processor appends sampled and forced tokens, rolls tokens back and ends outputs. The output processor also
checks stop conditions and adds log-probabilities. All changes to a sequence's tokens are made in this module, so their
counts are kept here too. This module uses no controllers and no devices.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from bridle.engine.guardrails.policy_enforcement import PolicyEnforcer
from bridle.engine.interfaces import TextDecoder
from bridle.engine.outputs.aligned import AlignedSampling
from bridle.engine.outputs.constraint_meter import ConstraintMeter, ForcedRun, run_text
from bridle.engine.outputs.healed_text import HealedText
from bridle.engine.outputs.output_holdback import hold, push_guarded, release, trim, watch_of
from bridle.engine.outputs.repeats import Repeats
from bridle.engine.outputs.stop_strings import OutputText, Released
from bridle.engine.outputs.trace_recorder import TraceRecorder
from bridle.engine.scheduling.scheduler import Scheduler
from bridle.engine.scheduling.step_plan import SampleRow, StepResult
from bridle.engine.sequence import Sequence, check_number
from bridle.engine.sequence_state import PendingToken
from bridle.engine.statistics import EngineStatistics
from bridle.errors import BridleError, InvalidRequest
from bridle.outputs import (
    BY_ITSELF,
    Embedded,
    Event,
    Finished,
    FinishReason,
    Forked,
    Logprob,
    PromptEvent,
    PromptProgress,
    Rewind,
    TokenEvent,
)

_NO_TEXT = Released("")
#: Reasons that end an output at once, even if the client still waits for scores.
_ABRUPT = frozenset({FinishReason.ERROR, FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.OUTRANKED})


class OutputProcessor:
    """Changes sequences and collects the events of the current step.

    `on_finish(seq, event)` receives each `Finished` event; the engine decides when to send it.
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
        self.tracer = TraceRecorder(self.events.append, decoder)
        self.policing = PolicyEnforcer(self, statistics, decoder)

    # -- tokens ------------------------------------------------------------------------------------------

    def begin(self, seq: Sequence) -> None:
        """Begin a sequence after its prompt is final. Tokens that another engine generated for the sequence give no
        events, because the client already has them."""
        seq.output.usage.prompt_tokens = seq.num_prompt
        self._statistics.num_prompt_tokens += seq.num_prompt
        if seq.sampling.measures_constraint:
            seq.output.meter = ConstraintMeter(seq.sampling.constraint_floor)
        if seq.sampling.aligned and seq.is_controlled:
            seq.output.aligned = AlignedSampling(partial(check_number, seq.key), seq.sampling.aligned)
        self._open_text(seq)
        if seq.request.generated:
            seq.resume_from(seq.request.generated)
            if seq.output.text is not None:
                for token in seq.request.generated:
                    seq.output.text.push(token)
                seq.output.text.num_told = len(seq.request.generated)

    def _open_text(self, seq: Sequence) -> None:
        """Begin the output text of a sequence without generated tokens."""
        if self._decoder is None or not (seq.request.detokenize or seq.request.guard):
            return
        state, healing = self._decoder.open(seq.tokens, seq.sampling.skip_special_tokens), seq.request.healing
        state = state if healing is None else HealedText(state, healing.num_chars)
        sampling = seq.sampling
        watch = None if seq.request.guard is None else watch_of(seq, seq.request.guard, self._decoder)
        repeats = None if seq.request.repeats is None else Repeats(seq.request.repeats)
        seq.output.text = OutputText(
            state, sampling.stop, sampling.include_stop_str_in_output, sampling.banned_phrases, watch, repeats
        )

    def append(self, seq: Sequence, token: int, logprob: Logprob | None = None, *, forced: bool) -> bool:
        """Append one token. Returns whether the output has already ended."""
        output, wants_logprobs = seq.output, seq.sampling.logprobs is not None
        is_scored = not forced and (logprob is not None or not wants_logprobs)
        seq.tokens.append(token)
        self._count(seq, forced)
        if output.meter is not None:
            if forced:
                output.meter.add_forced(len(seq.tokens) - 1, token)
            elif is_scored:
                output.num_scored = len(seq.tokens)
        if output.text is None:
            released = _NO_TEXT
        elif seq.request.guard is None:
            released = output.text.push(token, forced)
        else:
            released = push_guarded(seq, output.text, seq.request.guard, token, forced)
        text, stop, num_taken, num_banned, hit = released
        if seq.trace is not None:
            self.tracer.token(seq, token, text, forced=forced)
        if wants_logprobs and is_scored:
            output.num_scored = len(seq.tokens)
            logprob = self._spelled(seq, logprob)
        if output.prompt_sent and (is_scored or not wants_logprobs):
            event = TokenEvent(seq.request.id, seq.index, token, text, logprob, forced)
            if output.text is not None and output.text.may_go:
                self.events += hold(seq, output.text, event)
            else:
                self.events.append(event)
        else:
            output.unsent.append(PendingToken(token, text, forced))
        if num_banned:
            output.num_banned, output.hit = num_banned, hit
            return True
        if num_taken:
            self.events += release(seq)
            self.events.append(Rewind(seq.request.id, seq.index, 0, num_taken))
            if seq.trace is not None:
                self.tracer.rewind(seq, 0, num_taken)
        return self._check_stop(seq, stop) or (hit is not None and self.policing.end_by(seq, hit))

    def append_plain(self, seq: Sequence, token: int, logprob: Logprob | None) -> bool:
        """Append a sampled token to a sequence that has no trace and no constraint report. Most tokens take this path,
        so the method must be fast. Returns False if other tokens will be sampled instead of this token."""
        output, text = seq.output, seq.output.text
        if seq.sampling.logprobs is not None or not output.prompt_sent or (text is not None and not text.is_plain):
            self.append(seq, token, logprob, forced=False)
            return not output.num_banned or self.put_right(seq)
        seq.tokens.append(token)
        output.usage.sampled_tokens += 1
        self._statistics.num_sampled_tokens += 1
        piece = "" if text is None else text.push_plain(token)
        self.events.append(TokenEvent(seq.request.id, seq.index, token, piece))
        if token in seq.stop_ids or len(seq.tokens) >= seq.max_len or seq.request.stopping:
            self._check_stop(seq, None)
        return True

    def _count(self, seq: Sequence, forced: bool) -> None:
        if forced:
            seq.output.usage.forced_tokens += 1
            self._statistics.num_forced_tokens += 1
        else:
            seq.output.usage.sampled_tokens += 1
            self._statistics.num_sampled_tokens += 1

    def note_drawn(self, seq: Sequence, row: SampleRow, result: StepResult, number: int, *, is_draft: bool) -> None:
        """Record the distribution from which row `number` of a step was sampled, for the trace and the constraint
        report."""
        if seq.trace is not None:
            self.tracer.drawn(seq, row, result, number, is_draft=is_draft)
        self.note_removed(seq, row, result, number)

    def note_removed(self, seq: Sequence, row: SampleRow, result: StepResult, number: int) -> None:
        """Record the probability that the mask of row `number` removed, for the constraint report."""
        draw = result.draws[number] if seq.output.meter is not None and row.mask is not None and result.draws else None
        if draw is not None and seq.output.meter is not None:
            seq.output.meter.usage.add_removed(draw.taken)

    def spell(self, seq: Sequence, run: ForcedRun) -> str:
        """Return the text of a run of forced tokens."""
        return run_text(self._decoder, seq.tokens, run)

    def count_replaced(self, seq: Sequence) -> None:
        """Count a sampled token that a splice replaced before it entered the sequence."""
        self._count(seq, forced=False)
        seq.output.usage.rewound_tokens += 1
        self._statistics.num_rewound_tokens += 1

    def count_drafts(self, seq: Sequence, num_drafted: int, num_right: int) -> None:
        """Count the draft tokens of one step, and how many of them were accepted."""
        seq.output.usage.drafted_tokens += num_drafted
        seq.output.usage.accepted_tokens += num_right
        self._statistics.num_drafted_tokens += num_drafted
        self._statistics.num_accepted_tokens += num_right

    def rewind(self, seq: Sequence, num_tokens: int) -> None:
        """Roll back the last `num_tokens` tokens. If the output has fewer tokens, prompt tokens are rolled back too."""
        if num_tokens == 0:
            return
        output = seq.output
        num_generated = min(num_tokens, seq.num_generated)
        num_unsent = min(num_generated, len(output.unsent))
        dropped = output.unsent[len(output.unsent) - num_unsent :]
        del output.unsent[len(output.unsent) - num_unsent :]
        num_held = min(num_generated - num_unsent, len(output.held))
        num_hidden = sum(len(item.text) for item in dropped)
        num_hidden += sum(len(event.text) for event in output.held[len(output.held) - num_held :])
        del output.held[len(output.held) - num_held :]
        seq.truncate(len(seq.tokens) - num_tokens)
        self._scheduler.on_rewind(seq)
        if output.meter is not None:
            output.meter.truncate(len(seq.tokens))
        if output.aligned is not None:
            output.aligned.truncate(seq.num_generated)
        num_chars = 0
        if output.text is not None:
            num_chars = output.text.rewind(num_generated, num_hidden)
            num_trimmed = trim(seq, num_chars)
            num_chars, num_hidden = num_chars - num_trimmed, num_hidden + num_trimmed
            if num_tokens > num_generated:
                self._open_text(seq)
        output.bans = {at: tokens for at, tokens in output.bans.items() if at <= len(seq.tokens)}
        output.usage.rewound_tokens += num_generated
        self._statistics.num_rewound_tokens += num_generated
        num_told = num_generated - num_unsent - num_held
        if seq.trace is not None:
            self.tracer.rewind(seq, num_generated, num_chars + num_hidden, num_tokens - num_generated)
        if num_told or num_chars:
            self.events.append(Rewind(seq.request.id, seq.index, num_told, num_chars))

    def restart(self, seq: Sequence) -> None:
        """Roll back the whole output, so that it restarts with an empty text."""
        assert seq.output.aligned is not None
        seq.output.ending, num_tokens = None, seq.num_generated
        self.rewind(seq, num_tokens)
        seq.output.aligned.restart()
        self.policing.note_change(seq, num_tokens)

    def force(self, seq: Sequence, tokens: Iterable[int]) -> bool:
        """Append tokens that were not sampled, up to the token that ends the output. If a policy replaces part of the
        text, the remaining tokens are still appended. If other tokens will be sampled instead, the remaining tokens are
        dropped and False is returned."""
        waiting, num_spelled, num_retries = deque(tokens), 0, seq.output.num_retries
        while waiting:
            if num_spelled:
                num_spelled -= 1
            else:  # several matches among these tokens count as one attempt
                seq.output.num_retries = min(seq.output.num_retries, num_retries)
            has_ended = self.append(seq, waiting.popleft(), forced=True)
            if seq.output.num_banned:
                replaced = self.policing.ban(seq)
                if replaced is None:
                    self.policing.note_change(seq, len(waiting))
                    return False
                waiting.extendleft(reversed(replaced))
                num_spelled += len(replaced)
            elif has_ended:
                break
        return True

    def put_right(self, seq: Sequence) -> bool:
        """Roll back forbidden text, and append the replacement that a policy gives. Returns False if other tokens will
        be sampled instead of this token."""
        replaced = self.policing.ban(seq)
        return replaced is not None and self.force(seq, replaced)

    # -- log-probabilities -------------------------------------------------------------------------------

    def add_scores(self, seq: Sequence, scores: list[Logprob]) -> None:
        """Record the log-probabilities of the tokens from `num_scored` on."""
        output = seq.output
        for bare in scores:
            score = self._spelled(seq, bare)
            if output.num_scored < seq.num_prompt:
                output.prompt_logprobs.append(score)
            elif output.unsent and seq.sampling.logprobs is not None:
                self._send(seq, output.unsent.pop(0), score)
            if output.meter is not None and output.num_scored >= seq.num_prompt:
                output.unlikely = output.meter.add_score(output.num_scored, bare.logprob) or output.unlikely
            if output.aligned is not None and output.num_scored >= seq.num_prompt and not output.aligned.must_restart:
                chance = math.exp(bare.logprob)
                output.aligned.advance(seq.tokens[output.num_scored], chance, chance)
            output.num_scored += 1
            self.note_prompt(seq)

    def _spelled(self, seq: Sequence, logprob: Logprob | None) -> Logprob | None:
        if logprob is None or self._decoder is None or not seq.request.detokenize:
            return logprob
        return logprob.spelled(self._decoder.token_text)

    def note_prompt(self, seq: Sequence) -> None:
        """Report once to the client that the prompt was computed. Does nothing while log-probabilities of the prompt
        are missing."""
        wants_scores = seq.sampling.prompt_logprobs is not None
        if seq.output.prompt_sent or (wants_scores and seq.output.num_scored < seq.num_prompt):
            return
        seq.output.prompt_sent = True
        seq.output.usage.cached_tokens = seq.kv.num_cached
        if seq.trace is not None:
            self.tracer.prompt(seq)
        logprobs: tuple[Logprob | None, ...] = ()
        if wants_scores:
            logprobs = (*[None] * (seq.num_prompt - len(seq.output.prompt_logprobs)), *seq.output.prompt_logprobs)
        prompt = tuple(seq.tokens[: seq.num_prompt])
        self.events.append(
            PromptEvent(
                seq.request.id,
                seq.index,
                prompt,
                seq.output.usage.cached_tokens,
                logprobs,
                queued=seq.queue.seconds or 0.0,
                opening=seq.control.opening_seconds,
            )
        )
        if seq.output.unsent and seq.sampling.logprobs is None:
            self._send_all(seq)

    def note_progress(self, sequences: Iterable[Sequence]) -> None:
        """Report the progress of prompts that a step has partly computed."""
        for seq in sequences:
            is_begun = seq.kv.num_computed > 0  # False if the sequence was preempted meanwhile
            if is_begun and not (seq.output.prompt_sent or seq.is_finished):
                num_cached = seq.kv.num_cached
                num_computed = max(min(seq.kv.num_computed, seq.num_prompt) - num_cached, 0)
                self.events.append(PromptProgress(seq.request.id, seq.index, num_computed, num_cached))

    def _send(self, seq: Sequence, held: PendingToken, logprob: Logprob | None) -> None:
        """Send a token that was held back."""
        event = TokenEvent(seq.request.id, seq.index, held.token, held.text, logprob, held.forced)
        if seq.output.text is not None and seq.output.text.may_go:
            self.events += hold(seq, seq.output.text, event)
        else:
            self.events.append(event)

    def _send_all(self, seq: Sequence) -> None:
        """Send all tokens that were held back, without their log-probabilities."""
        while seq.output.unsent:
            self._send(seq, seq.output.unsent.pop(0), None)

    # -- endings -----------------------------------------------------------------------------------------

    def _check_stop(self, seq: Sequence, stop_string: str | None) -> bool:
        """End the output if its newest token completes it. Returns whether the output ended."""
        if seq.tokens[-1] in seq.stop_ids:
            self.finish(seq, FinishReason.STOP, seq.tokens[-1])
        elif stop_string is not None:
            self.finish(seq, FinishReason.STOP, stop_string)
        elif len(seq.tokens) >= seq.max_len:
            self.finish(seq, FinishReason.LENGTH)
        else:
            return bool(seq.request.stopping) and self._check_criteria(seq)
        return True

    def _check_criteria(self, seq: Sequence) -> bool:
        """End the output if a user-defined stopping criterion says so. A criterion that raises an error ends its
        request, but not the engine."""
        for criterion in seq.request.stopping:
            try:
                stop = criterion(seq.tokens, seq.num_prompt)
            except Exception as error:
                self.fail(seq, InvalidRequest(f"a stopping criterion raised {error!r}", "stopping_criteria"))
                return True
            if stop is not None:
                is_length = stop is FinishReason.LENGTH
                self.finish(seq, FinishReason.LENGTH if is_length else FinishReason.STOP, None if is_length else stop)
                return True
        return False

    def finish(
        self, seq: Sequence, reason: FinishReason, stop: int | str | None = None, error: BridleError | None = None
    ) -> None:
        """End the output, either now or when the log-probabilities that the client requested are known."""
        if seq.is_finished:
            return
        guard = seq.request.guard
        if guard is not None and reason is FinishReason.CONTROLLER and isinstance(stop, str):
            stop = guard.clean(stop)
        if reason not in _ABRUPT and seq.wants_scores:
            seq.output.ending = reason, stop
            seq.control.clear_hold()
            seq.clamp_computed()
            return
        if reason not in _ABRUPT:
            self.note_prompt(seq)
        elif not seq.output.prompt_sent:
            seq.output.usage.cached_tokens = seq.kv.num_cached
        if seq.output.unsent and (reason in _ABRUPT or seq.sampling.logprobs is None):
            self._send_all(seq)
        tail = "" if guard is None else self.policing.close(seq)
        if seq.output.held:
            self.events += release(seq)
        tail += seq.output.text.flush() if seq.output.text is not None else ""
        seq.output.usage.completion_tokens = seq.num_generated
        if seq.output.meter is not None:
            tokens = seq.tokens[: len(seq.tokens) - (seq.num_generated > 0 and seq.tokens[-1] in seq.stop_ids)]
            seq.output.usage.constraint = seq.output.meter.report(self._decoder, tokens, seq.num_prompt)
        self._scheduler.remove(seq, parks=seq.request.parks and reason in BY_ITSELF)
        seq.output.usage.retained_tokens = seq.kv.num_retained
        self._statistics.finished[reason.value] += 1
        event = Finished(
            seq.request.id, seq.index, reason, seq.output.usage, tail, stop, error, held=seq.control.held_seconds
        )
        self._on_finish(seq, event)

    def drop_held(self, seq: Sequence, num_tokens: int) -> None:
        """Roll back the last `num_tokens` held tokens, and remove their text from the other held tokens."""
        output = seq.output
        kept = len(output.held) - num_tokens
        if seq.trace is not None:
            self.tracer.rewind(seq, num_tokens, sum(len(event.text) for event in output.held))
        output.held[:] = [replace(event, text="") for event in output.held[:kept]]
        seq.truncate(len(seq.tokens) - num_tokens)
        self._scheduler.on_rewind(seq)
        output.usage.rewound_tokens += num_tokens
        self._statistics.num_rewound_tokens += num_tokens

    def embed(self, seq: Sequence, vector: array[float]) -> None:
        """Send the vector of a computed prompt and end the output, because the request asks only for a vector."""
        self.events.append(Embedded(seq.request.id, seq.index, vector))
        self.finish(seq, FinishReason.STOP)

    def finish_when_scored(self, seq: Sequence) -> None:
        """End an output that waited only for its log-probabilities, if they are complete."""
        if seq.output.ending is not None and not seq.wants_scores:
            reason, stop = seq.output.ending
            self.finish(seq, reason, stop)

    def fail(self, seq: Sequence, error: BridleError) -> None:
        """End the output with an error."""
        self.finish(seq, FinishReason.ERROR, error=error)

    def fail_by_controller(self, seq: Sequence, error: BridleError) -> None:
        """End the output with its controller's error."""
        guard = seq.request.guard
        self.fail(seq, error if guard is None else guard.clean_error(error))

    def announce_fork(self, parent: Sequence, child: Sequence) -> None:
        """Inform the client of a new output before any other event of that output."""
        self._statistics.num_forks += 1
        held = parent.output.held
        num_hidden = sum(len(event.text) for event in held)
        text = parent.output.text.released_text(num_hidden) if parent.output.text else ""
        num_told = parent.num_generated - len(held)
        if child.output.text is not None and parent.output.text is not None:
            child.output.text.num_told = parent.output.text.num_told
        child.output.held = [replace(event, index=child.index) for event in held]
        if child.trace is not None:
            self.tracer.fork(parent, child)
        self.events.append(Forked(child.request.id, child.index, parent.index, num_told, text))

    def take_events(self) -> list[Event]:
        """Return the events that were collected since the last call."""
        events = self.events.copy()
        self.events.clear()
        return events
