"""Asks controllers for decisions, and stores and validates their answers.

A controller is asked as soon as tokens of its sequence become known. A controller's answer is applied at the sequence's
next logits row. Forced tokens, stops and waits need no logits row, so they are applied earlier. A sequence is left out
of a step if its controller has not answered when its logits row is ready. This module uses no device and no text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from operator import attrgetter

from bridle.config import EngineConfig
from bridle.engine.control.controller_lookahead import ControllerLookahead
from bridle.engine.control.controller_output import ControllerOutputs
from bridle.engine.control.deadlock import DeadlockWatch
from bridle.engine.control.decision import DRAW, Branch, Decision
from bridle.engine.control.decision_validator import DecisionValidator
from bridle.engine.interfaces import DRAWN, Answer, Ask, ControllerPool, ExecutorInfo, ask_after, check_pools
from bridle.engine.outputs.output_processor import OutputProcessor
from bridle.engine.request import Request
from bridle.engine.sequence import Sequence
from bridle.engine.spec_decode.speculation import Speculation
from bridle.engine.statistics import EngineStatistics
from bridle.errors import BridleError, ControllerDeadlock, ControllerError, ControllerTimeout, UnsupportedFeature
from bridle.outputs import Finished, FinishReason

Candidates = tuple[tuple[int, float], ...] | None

#: Maximum number of times in one step that forced tokens may follow forced tokens. Further ones wait for the next
#: step.
_MAX_ROUNDS = 32


class ControllerManager:
    """Asks the controller pools and stores their answers.

    In `config`, `max_idle_steps` limits how long an output waits. `max_noops` limits how often in a row all outputs of
    a request may answer with a no-op. `emit` sends the `Finished` events that the `ControllerOutputs` object `words`
    held back. `speculation` drafts tokens for sequences whose controllers are about to be asked.
    """

    def __init__(
        self,
        pools: Iterable[ControllerPool],
        progress: OutputProcessor,
        statistics: EngineStatistics,
        clock: Callable[[], float],
        emit: Callable[[Sequence, Finished], None],
        info: ExecutorInfo,
        config: EngineConfig,
        speculation: Speculation,
    ) -> None:
        check_pools(pools := tuple(pools))
        self.pools = pools
        self._progress = progress
        self._statistics = statistics
        self._clock = clock
        self._rules = DecisionValidator(info.vocab_size, info.unnamed)
        self._max_idle_steps = config.max_idle_steps
        self._speculation = speculation
        self._watch = DeadlockWatch(config.max_noops, clock)
        self.sequences: dict[int, Sequence] = {}  # live sequences with a controller
        self.words = ControllerOutputs(progress, clock, emit)
        self.foresight = ControllerLookahead(self.sequences, self._rules, self.words, progress, speculation, clock)

    def pool_for(self, controller: object) -> ControllerPool | None:
        """Return the pool that runs `controller`, or None if no pool does."""
        return next((pool for pool in self.pools if pool.accepts(controller)), None)

    def check_lookahead(self, request: Request) -> None:
        """Raise `UnsupportedFeature` if a request wants lookahead but the forced tokens of its controller cannot be
        predicted."""
        pool = None if request.controller is None else self.pool_for(request.controller)
        if pool is None or "forced_text" in pool.capabilities:
            return
        why = "follows a constraint alone, not a controller or one with policies"
        raise UnsupportedFeature(f"lookahead: got {request.sampling.lookahead}; it {why}. Leave it out.", "lookahead")

    # -- asking ------------------------------------------------------------------------------------------

    def add(self, seq: Sequence, first: Ask) -> None:
        """Control a new sequence. `first` is the sequence's first `Ask`; the next call of `ask` sends it to the
        controller pool."""
        self.sequences[seq.id] = seq
        self._watch.add(seq)
        seq.control.pending_ask = first
        seq.control.num_told = seq.control.num_kept = len(seq.tokens)

    def forget(self, seq: Sequence) -> None:
        """Forget a sequence that was rolled back before its controller pool was asked about the sequence."""
        self.sequences.pop(seq.id, None)
        self._watch.drop(seq)

    def report(
        self, seq: Sequence, sampled: int | None = None, candidates: Candidates = None, probes: tuple[float, ...] = ()
    ) -> None:
        """Record that the controller of `seq` does not know the newest tokens of `seq`, so that the controller is asked
        for a decision. `sampled` is the sampled token, chosen among `candidates`. `probes` are the projections of
        hidden states at the position of the sampled token."""
        control = seq.control
        if control.pool is None:
            return
        control.num_moves += 1
        is_next = control.num_kept == control.num_told == len(seq.tokens) - 1
        has_news = control.pending_ask is not None or control.pending_token is not None or seq.output.changes
        if sampled is not None and is_next and not has_news:  # true for nearly all tokens
            control.answer = None
            if candidates is None and not probes and sampled == seq.tokens[-1]:
                control.pending_token = sampled
            else:
                control.pending_ask = Ask(seq.id, (seq.tokens[-1],), 0, sampled, candidates, probes=probes)
            return
        control.answer, news = None, _take_news(seq) or Ask(seq.id)
        tokens, backtrack = tuple(seq.tokens[control.num_kept :]), control.num_told - control.num_kept
        known, changes = news.tokens, (*news.changes, *self._progress.policing.take_changes(seq))
        is_further = not (backtrack or changes) and len(tokens) > len(known) and tokens[: len(known)] == known
        if sampled is None or not is_further or len(tokens) > len(known) + 1:
            control.spliced_at = len(seq.tokens)
        control.pending_ask = (
            replace(  # a fork's first ask also names its parent; several draft tokens of a step are reported in one ask
                news,
                tokens=tokens,
                backtrack=backtrack,
                sampled=sampled,
                candidates=candidates,
                num_foreseen=len(known) if is_further else 0,
                changes=changes,
                probes=probes,
            )
        )

    def mark_answered_ahead(self, seq: Sequence) -> None:
        """Record that a predicted answer ended the output. The predicted answer's logs and variables are still sent."""
        news = _take_news(seq)
        if news is not None and news.tokens:
            seq.control.pending_ask = replace(news, sampled=None, candidates=None, num_foreseen=len(news.tokens))

    def ask(self) -> None:
        """Ask the controllers of all sequences that changed in this step. A sequence and its forks are reported to
        their controllers in the same call. A controller that waits is asked again after its answer was applied. If only
        log-probabilities of a sequence are missing, its controller is asked for its last logs."""
        asks = defaultdict[ControllerPool, list[Ask]](list)
        sampled = defaultdict[ControllerPool, dict[int, int]](dict)
        self._watch.next_round()
        for seq in self.sequences.values():
            control, pool = seq.control, seq.control.pool
            if pool is None or seq.is_choosing:
                continue
            token = control.pending_token
            if token is None or seq.output.ending is not None:
                ask = self._next_ask(seq)
                if ask is None:
                    continue
                asks[pool].append(ask)
                control.num_told = control.num_kept = control.num_told + len(ask.tokens) - ask.backtrack
                control.pending_ask = None
            else:
                sampled[pool][seq.id] = token
                control.num_told = control.num_kept = control.num_told + 1
                control.pending_token = None
            control.awaits_answer, control.asked_round = True, self._watch.round
            if seq.trace is not None:
                self._progress.tracer.asked(seq, self._clock())
        for seq in self.words.pending_final_asks:
            if seq.control.pool is not None:
                asks[seq.control.pool].append(replace(_take_news(seq) or Ask(seq.id), final=True))
        self.words.pending_final_asks.clear()
        for pool in {**asks, **sampled}:
            self._send(pool, asks[pool], sampled[pool])

    def _next_ask(self, seq: Sequence) -> Ask | None:
        """Return the `Ask` for a sequence without a new sampled token, or None if its controller need not be asked."""
        control, ask = seq.control, _take_news(seq)
        if ask is None and control.is_suspended and not (control.awaits_answer or control.answer):
            ask = Ask(seq.id, turns=self._watch.turns_due(seq))
        if ask is not None and seq.output.ending is not None:
            ask, control.final_ask_sent = replace(ask, final=True), True
        return ask

    def _send(self, pool: ControllerPool, asks: list[Ask], sampled: dict[int, int]) -> None:
        """Send the `Ask` messages for one controller pool, in the order of sequence ids."""
        is_told_ahead = "remote_lookahead" in pool.capabilities and pool.is_told_ahead
        if not (asks or is_told_ahead):
            pool.ask_sampled({seq_id: sampled[seq_id] for seq_id in sorted(sampled)})
            return
        asks += [ask_after(seq_id, token) for seq_id, token in sampled.items()]
        asks.sort(key=attrgetter("seq_id"))
        pool.ask(self.foresight.with_drafts(asks) if is_told_ahead else asks)

    def end(self, seq: Sequence, event: Finished) -> bool:
        """Record that an output ended. Returns True if the output's `Finished` event waits for the last logs of the
        controller."""
        if self.sequences.pop(seq.id, None) is None:
            return False
        self._watch.drop(seq)
        return self.words.hold(seq, event)

    # -- collecting answers ------------------------------------------------------------------------------

    def collect_answers(self, due: Collection[Sequence] = (), deadline: float | None = None) -> None:
        """Process the answers that have been received. Wait until `deadline` for the answers of the sequences in `due`.
        This method runs between the forward pass and sampling in most steps, so the usual answer (sample) has a fast
        path."""
        for pool in self.pools:
            ids = [seq.id for seq in due if seq.control.pool is pool]
            for seq_id, answer in pool.collect(ids, deadline if ids else None).items():
                seq = self.sequences.get(seq_id)
                if seq is None:
                    self.words.hear(seq_id, answer)
                    continue
                control = seq.control
                if answer is DRAWN and seq.trace is None and not (control.is_suspended or control.final_ask_sent):
                    control.answer, control.awaits_answer, control.missed_deadline = DRAW, False, False
                else:
                    self._on_answer(seq, answer)
        if self.words.held:
            self.words.release_overdue()

    def gather_any(self, deadline: float) -> None:
        """Wait until a controller has answered, because nothing can be computed before that."""
        self.collect_answers([seq for seq in self.sequences.values() if seq.control.awaits_answer], deadline)

    def _on_answer(self, seq: Sequence, answer: Answer) -> None:
        """Process one answer about an active sequence."""
        if seq.trace is not None:
            self._progress.tracer.heard(seq, answer, self._clock())
        if answer.log or answer.stored:
            self.words.tell(seq, answer)
        seq.control.awaits_answer = False
        if seq.control.final_ask_sent:
            return
        if answer.error is not None:
            self._lose(seq, answer.error)
        elif answer.decision is not None:
            seq.control.answer = answer.decision
            seq.control.missed_deadline = False
            if answer.decision is not DRAW:
                self._speculation.on_decision(seq, answer.decision)
            if seq.control.is_suspended or not answer.decision.is_draw:
                self._watch_wait(seq, answer.decision, answer.turns)

    def _watch_wait(self, seq: Sequence, decision: Decision, turns: int) -> None:
        why = self._watch.note_decision(seq, decision, turns)
        if why is not None:
            for stuck in self._watch.members(seq):
                self._progress.fail_by_controller(stuck, ControllerDeadlock(why))

    def _lose(self, seq: Sequence, error: ControllerError) -> None:
        """Record that the sequence's controller has failed and must not be asked again."""
        del self.sequences[seq.id]
        self._watch.drop(seq)
        if seq.control.pool is not None:
            seq.control.pool.close([seq.id])
        self._progress.fail_by_controller(seq, error)

    # -- applying answers that need no logits row --------------------------------------------------------

    def apply_early(self) -> None:
        """Apply the stops, waits and forced tokens that controllers have decided, so that this step includes them."""
        for seq in [seq for seq in self.sequences.values() if seq.control.missed_deadline]:
            self.idle(seq)
        for _ in range(_MAX_ROUNDS):
            self.collect_answers()
            unusual = [
                seq
                for seq in self.sequences.values()
                if seq.control.answer is not DRAW or seq.control.num_idle_steps  # true for few sequences
            ]
            if not [seq for seq in unusual if not seq.is_choosing and self._apply_early(seq)]:
                return
            self.ask()

    def _apply_early(self, seq: Sequence) -> bool:
        """Apply one answer of a controller, if the answer needs no logits row. Returns whether tokens were forced."""
        decision = seq.control.answer
        if decision is None or seq.output.ending is not None:
            return False
        if decision.is_stop:
            self._progress.finish(seq, FinishReason.CONTROLLER, decision.reason)
        elif decision.is_wait or decision.is_noop:
            self.suspend(seq)
        else:
            self._go_on(seq)
            if decision.is_forced and self.check(seq, decision):
                splice = decision.branches[0].splices[0]
                self.force(seq, splice.backtrack, splice.ff_tokens, scales=decision.branches[0].control_vectors)
                return True
        return False

    def force(
        self,
        seq: Sequence,
        backtrack: int,
        tokens: tuple[int, ...],
        sampled: int | None = None,
        candidates: Candidates = None,
        scales: Mapping[str, float] | None = None,
        probes: tuple[float, ...] = (),
    ) -> None:
        """Roll back `backtrack` tokens and append `tokens`. `scales` are the new scales of control vectors. `sampled`
        is the token that the appended tokens replace, and was sampled among `candidates` (None: no such token)."""
        self._progress.rewind(seq, backtrack)
        seq.scale_vectors(scales)
        is_kept = self._progress.force(seq, tokens)
        seq.clamp_computed()
        self.report(seq, *((sampled, candidates, probes) if is_kept else ()))

    def suspend(self, seq: Sequence) -> None:
        """Suspend a sequence whose controller waits: keep its KV, compute nothing for it, and ask the controller
        again."""
        decision, seq.control.answer = seq.control.answer, None
        seq.control.is_suspended = True
        seq.control.awaited = () if decision is None else decision.awaited
        seq.clamp_computed()
        self.idle(seq, decision)

    def mark_late(self, seq: Sequence) -> None:
        """Record that the controller of a sequence did not answer in time for the sequence's logits row."""
        self._statistics.num_late_answers += 1
        seq.control.missed_deadline = True
        seq.clamp_computed()
        self.idle(seq)

    def idle(self, seq: Sequence, decision: Decision | None = None) -> None:
        """Count a step in which the sequence made no progress, because of `decision` or because its controller was
        late. An output ends after too many steps without progress in a row."""
        now = self._clock()
        if seq.trace is not None:
            self._progress.tracer.held(seq, decision, now)
        seq.control.held_seconds += now - seq.control.held_at if seq.control.num_idle_steps else 0.0
        seq.control.held_at = now
        seq.control.num_idle_steps += 1
        if seq.control.num_idle_steps > self._max_idle_steps:
            message = f"waited for {seq.control.num_idle_steps} steps in a row; at most {self._max_idle_steps}"
            self._progress.fail(seq, ControllerTimeout(message))

    # -- checking ----------------------------------------------------------------------------------------

    def branches(self, seq: Sequence) -> tuple[Branch, ...]:
        """Return the branches by which the controller of `seq` continues the sequence. The sequence has no branches if
        it ended, or if its controller waits or is late."""
        decision = seq.control.answer
        if decision is None:
            self.mark_late(seq)
            return ()
        if not decision.is_draw:
            if decision.is_stop:
                self._progress.finish(seq, FinishReason.CONTROLLER, decision.reason)
                return ()
            if decision.is_wait or decision.is_noop:
                self.suspend(seq)
                return ()
        if not self.check(seq, decision):
            return ()
        self._go_on(seq)
        return decision.branches

    def _go_on(self, seq: Sequence) -> None:
        """Record that the sequence no longer waits for its controller."""
        seq.control.is_suspended = False
        if seq.control.awaited:
            seq.control.held_seconds += self._clock() - seq.control.held_at
            seq.control.awaited = ()
        seq.control.num_idle_steps = 0
        if seq.trace is not None:
            self._progress.tracer.resumed(seq, self._clock())

    def check(self, seq: Sequence, decision: Decision) -> bool:
        """Return whether `decision` is valid. If `decision` is invalid, the sequence ends with an error that names the
        problem."""
        problem = self._rules.problem(seq, decision)
        if problem is not None:
            self._progress.fail(seq, problem)
        return not seq.is_finished


def _take_news(seq: Sequence) -> Ask | None:
    """Return one `Ask` that reports all changes to the controller, even if several tokens are new. If there are no
    changes, the result is None."""
    control = seq.control
    if control.pending_token is not None:
        control.pending_ask, control.pending_token = ask_after(seq.id, control.pending_token), None
    return control.pending_ask


def as_controller_error(error: BaseException) -> BridleError:
    """Return the client's error for a controller that could not be created."""
    if isinstance(error, BridleError):
        return error
    return ControllerError(f"the controller could not be started: {error!r}")
