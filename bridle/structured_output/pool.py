"""The `ControllerPool` that runs constraints next to an engine.

Tokens are committed on the engine's thread as soon as they are reported, because that takes microseconds. A complete
text therefore ends, and forced tokens are appended, before the next step is scheduled and without a forward pass. If
the grammar leaves a choice, threads compute the mask while the device computes logits. A sequence whose grammar was
slow once is computed only on those threads from then on, so that it cannot delay the engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress

from bridle.engine.control.decision import Decision
from bridle.engine.interfaces import Answer, Ask, Capability, ControllerPool
from bridle.engine.request import Request
from bridle.errors import BridleError, ControllerError, InternalError
from bridle.sampling import SamplingParams
from bridle.structured_output.canonical import CanonicalDraws
from bridle.structured_output.compiler import Compiler
from bridle.structured_output.constrained_sequence import (
    SLOW_MASK_SECONDS,
    SLOW_SECONDS,
    ConstrainedSequence,
    as_controller_error,
    next_part,
)
from bridle.structured_output.limits import ConstraintLimits
from bridle.structured_output.mask_workers import Workers
from bridle.structured_output.matcher import Matcher
from bridle.structured_output.pattern_end import PatternEnd
from bridle.structured_output.scored_texts import scored_texts
from bridle.structured_output.spec import Constraint
from bridle.structured_output.vocabulary import GrammarVocabulary

#: Seconds of computing after which a thread publishes its answers so far.
_TELL = 0.0005
#: Maximum number of masks that a thread takes at a time. Larger parts mean fewer hand-overs, smaller ones a more even
#: load.
_MAX_PART = 16

_Due = tuple[Ask, ConstrainedSequence]
_Answered = tuple[int, ConstrainedSequence, Answer]


class ConstraintPool(ControllerPool):
    """Runs requests whose `controller` is a `Constraint`. `make_vocabulary` is called once, outside of the engine's
    thread, when the first request with a constraint comes. `clock` must be the clock of the engine."""

    capabilities = frozenset[Capability](("lookahead", "draft_masks", "draft_filtering", "forced_text"))

    def __init__(
        self,
        make_vocabulary: Callable[[], GrammarVocabulary],
        limits: ConstraintLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = limits or ConstraintLimits()
        self.compiler = Compiler(make_vocabulary, limits)
        self._clock = clock
        self._workers = Workers(limits.num_threads)
        self.opened: dict[str, ConstrainedSequence] = {}
        self.live: dict[int, ConstrainedSequence] = {}
        self._arrived = threading.Condition()
        self._answers: dict[int, Answer] = {}
        self.under_way: dict[int, ConstrainedSequence] = {}

    # -- opening -------------------------------------------------------------------------------------------

    def accepts(self, controller: object) -> bool:
        return isinstance(controller, Constraint)

    def open(self, request: Request) -> Future[tuple[int, ...]]:
        """Compile the constraint. The future raises `InvalidRequest` for a constraint that cannot be used."""
        future: Future[tuple[int, ...]] = Future()
        constraint = request.controller
        if not isinstance(constraint, Constraint):
            future.set_exception(InternalError(f"{constraint!r} is no constraint"))
            return future

        def begin(compiled: Future[Matcher]) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                self.opened[request.id] = self._opened(request, constraint, compiled.result().copy())
            except BaseException as error:  # a cancelled compilation is an error too
                future.set_exception(error if isinstance(error, BridleError) else as_controller_error(error))
            else:
                future.set_result(request.prompt)

        self.compiler.compile(constraint).add_done_callback(begin)
        return future

    def _opened(self, request: Request, constraint: Constraint, start: Matcher) -> ConstrainedSequence:
        scored = scored_texts(constraint, request, self.compiler, start)
        how = request.sampling.canonical
        canonical = None if how == "off" else CanonicalDraws(how == "strict")
        return ConstrainedSequence(start, constraint, _end_of(constraint, request.sampling), scored, canonical)

    def abandon(self, request: Request) -> None:
        self.opened.pop(request.id, None)

    # -- the step ------------------------------------------------------------------------------------------

    def ask(self, asks: Sequence[Ask]) -> None:
        """Handle asks. Forks are handled first, before their parents change. Answers without a mask are then given at
        once, and threads compute the answers with a mask."""
        for ask in asks:
            if ask.request is not None:
                self.live[ask.seq_id] = opened = self.opened.pop(ask.request.id)
                opened.is_led = bool(ask.request.sampling.speculate)
            elif ask.parent is not None:
                self.live[ask.seq_id] = self.live[ask.parent].copy()
        known: list[_Answered] = []
        masks: list[_Due] = []
        work: list[Callable[[], None]] = []
        for ask in asks:
            instance = self.live.get(ask.seq_id)
            if instance is None:
                continue
            if instance.is_slow:
                self.under_way[ask.seq_id] = instance
                work.append(self._work([(ask, instance)], is_whole=True))
                continue
            instance.forget_ahead()
            answer = instance.advance(ask)
            if answer is not None:
                known.append((ask.seq_id, instance, answer))
            else:
                if instance.is_led:
                    instance.ahead, instance.is_led = instance.matcher.copy(), False
                self.under_way[ask.seq_id] = instance
                masks.append((ask, instance))
        self._answer(known)
        work += [self._work(part) for part in _parts(masks, self._workers.num_threads)]
        if work:
            self._workers.submit(work)

    def _work(self, due: Sequence[_Due], *, is_whole: bool = False) -> Callable[[], None]:
        """Return a function that computes, in a thread, the masks of some answers. The answers are published together,
        unless one of the masks takes long."""

        def run() -> None:
            done: list[_Answered] = []
            told = began = time.thread_time()
            for ask, instance in due:
                answer = instance.advance(ask) if is_whole else None
                done.append((ask.seq_id, instance, answer or instance.masked()))
                now = time.thread_time()
                instance.is_slow = instance.is_slow or now - began > SLOW_MASK_SECONDS
                if now - told > _TELL:
                    self._answer(done)
                    told, done = now, []
                began = now
            self._answer(done)

        return run

    def _answer(self, answered: Iterable[_Answered]) -> None:
        with self._arrived:
            for seq_id, instance, answer in answered:
                if self.live.get(seq_id) is instance:
                    self._answers[seq_id] = answer
                if self.under_way.get(seq_id) is instance:
                    del self.under_way[seq_id]
            self._arrived.notify()

    def collect(self, seq_ids: Iterable[int], deadline: float | None) -> Mapping[int, Answer]:
        wanted = () if deadline is None else tuple(seq_ids)
        with self._arrived:
            while deadline is not None and any(seq_id in self.under_way for seq_id in wanted):
                left = deadline - self._clock()
                if left <= 0:
                    break
                self._arrived.wait(left)
            answers, self._answers = self._answers, {}
        return answers

    def filter_draft(self, seq_id: int, tokens: Sequence[int]) -> tuple[list[tuple[int, ...]], bool]:
        """Follow draft tokens up to a token that is not allowed or that ends the text. Copying the matcher costs more
        than following the tokens. So the copy is made only for a new sequence, or one that had draft tokens in the last
        step."""
        instance = self.live.get(seq_id)
        if instance is None or instance.is_slow:
            return [], False
        instance.is_led = True
        ahead, parts, place = instance.ahead, list[tuple[int, ...]](), 0
        while ahead is not None and place < len(tokens):
            try:
                part = next_part(ahead, tokens[place])
            except ControllerError:
                part = ()
            if not part:
                instance.ahead = None
                break
            parts.append(part)
            if tuple(tokens[place : place + len(part)]) != part:
                return parts, True
            place += len(part)
        return parts, False

    def draft_decision(self, seq_id: int, tokens: Sequence[int]) -> Decision | None:
        """Return the tokens forced after the draft `tokens`; if none are forced, return the mask after them. The copied
        matcher is then rolled back, because `filter_draft` continues from its position."""
        instance = self.live.get(seq_id)
        if instance is None or instance.is_slow or instance.seconds_ahead > SLOW_SECONDS:
            return None
        instance.is_led = True
        if instance.ahead is None and self._is_idle(seq_id):
            instance.ahead = instance.matcher.copy()
        if instance.ahead is None:
            return None
        began = time.thread_time()
        decision = self._look_ahead(instance, instance.ahead, tuple(tokens))
        spent = time.thread_time() - began
        instance.seconds_ahead += spent
        instance.is_slow = instance.is_slow or spent > SLOW_MASK_SECONDS
        return decision

    def _is_idle(self, seq_id: int) -> bool:
        """Return whether no thread uses the sequence's matcher. If a thread uses it, wait at most as long as a commit
        may take. Without this wait, the thread's speed would decide whether draft tokens are used."""
        with self._arrived:
            return self._arrived.wait_for(lambda: seq_id not in self.under_way, SLOW_SECONDS)

    def _look_ahead(self, instance: ConstrainedSequence, ahead: Matcher, tokens: tuple[int, ...]) -> Decision | None:
        """Return the decision after the draft `tokens`. A copy that has no decision, or cannot be rolled back, is
        dropped."""
        copied, instance.ahead = instance.leading(ahead), None
        answer = copied.advance(Ask(-1, tokens))
        if answer is None:
            answer = instance.masks[tokens] = copied.masked()
        if answer.decision is not None:
            with suppress(ControllerError):
                ahead.rollback(len(tokens))
                instance.ahead = ahead
        return answer.decision

    def lookahead(self, seq_id: int, tokens: Sequence[int]) -> list[Decision]:
        """Return the masks after each of the draft `tokens`, including forced tokens. Lookahead stops at a token that
        is not allowed or ends the text, if other tokens are forced, or after the time of a commit."""
        instance = self.live.get(seq_id)
        if instance is None or instance.is_slow or seq_id in self.under_way:
            return []
        ahead, known = instance.leading(instance.matcher.copy()), list[Decision]()
        began = time.thread_time()
        place, size = 0, 1  # the tokens that are reported next
        while place + size <= len(tokens):
            told = tuple(tokens[place : place + size])
            place += size
            answer = ahead.advance(Ask(seq_id, told)) or instance.masks.get(tuple(tokens[:place]))
            decision = (answer or ahead.masked()).decision
            if decision is None or not (decision.is_draw or decision.is_forced):
                break
            forced = () if decision.is_draw else decision.branches[0].splices[0].ff_tokens
            if tuple(tokens[place : place + len(forced)]) != forced:
                break
            known.append(decision)
            size = max(len(forced), 1)
            spent = time.thread_time() - began
            instance.is_slow = spent > SLOW_MASK_SECONDS
            if spent > SLOW_SECONDS:  # the engine waits
                break
        return known

    def forced_after(self, seq_id: int, tokens: Sequence[int], limit: int) -> list[tuple[int, ...]]:
        """Follow each of `tokens` on a copy of the matcher, as long as only one text may follow. A slow grammar is not
        followed."""
        instance, found = self.live.get(seq_id), list[tuple[int, ...]]()
        ahead = None
        for token in tokens:
            if instance is None or instance.is_slow or seq_id in self.under_way:
                found.append(())
                continue
            ahead = ahead or instance.matcher.copy()
            num_before = ahead.num_tokens
            leading = instance.leading(ahead)
            found.append(leading.forced_on(token, limit))
            instance.is_slow = leading.is_slow
            try:
                ahead.rollback(ahead.num_tokens - num_before)
            except ControllerError:
                ahead = None
        return found

    # -- closing -------------------------------------------------------------------------------------------

    def close(self, seq_ids: Sequence[int]) -> None:
        """Drop the matchers of these sequences. A matcher that a thread uses is dropped after its work."""
        with self._arrived:
            for seq_id in seq_ids:
                self.live.pop(seq_id, None)
                self._answers.pop(seq_id, None)
                self.under_way.pop(seq_id, None)

    def shutdown(self) -> None:
        self.compiler.close()
        self._workers.close()
        self.close([*self.live])
        self.opened.clear()


def _end_of(constraint: Constraint, sampling: SamplingParams) -> PatternEnd:
    """Return the object that detects the end of the text. Its constraint is None if the client ignores end tokens."""
    return PatternEnd(None if sampling.ignore_eos else constraint, sampling.min_tokens)


def _parts(masks: Sequence[_Due], num_threads: int) -> list[Sequence[_Due]]:
    """Divide the masks to compute into parts, two for each thread if there are enough masks."""
    size = min(max(1, -(-len(masks) // (2 * num_threads))), _MAX_PART)
    return [masks[start : start + size] for start in range(0, len(masks), size)]
