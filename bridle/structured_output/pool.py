"""The `ControllerPool` that runs constraints beside an engine.

Tokens are committed on the engine's thread as soon as they are reported, since that takes microseconds. So a complete
text stops, and tokens that must come are forced, before the next step is scheduled and without a forward pass. Where
there is a choice, threads compute the mask while the device computes logits. A sequence whose grammar was slow once is
handled only on those threads from then on, so that it cannot hold up the engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from bridle.engine.control.decision import Decision
from bridle.engine.interfaces import Answer, Ask, Capability, ControllerPool
from bridle.engine.request import Request
from bridle.errors import BridleError, ControllerError, InternalError, UnsupportedFeature
from bridle.sampling import SamplingParams
from bridle.structured_output.canonical import CanonicalDraws
from bridle.structured_output.compiler import Compiler
from bridle.structured_output.limits import ConstraintLimits
from bridle.structured_output.mask_workers import Workers
from bridle.structured_output.matcher import Matcher, end_row, fitting
from bridle.structured_output.pattern_end import PatternEnd
from bridle.structured_output.scored_texts import NOTHING_SCORED, ScoredTexts, scored_texts
from bridle.structured_output.spec import Choice, Constraint
from bridle.structured_output.vocabulary import GrammarVocabulary

#: A sequence whose commit or mask took more processor time than this, in seconds, is no longer handled on the engine's
#: thread.
SLOW_SECONDS = 0.002
SLOW_MASK_SECONDS = 0.01
#: After this much computing, in seconds, a thread publishes the answers that it has.
_TELL = 0.0005
#: The most masks that one thread takes at a time: more mean fewer hand-overs, fewer a more even load.
_MAX_PART = 16


@dataclass(slots=True, eq=False)
class _Instance:
    """One output under its constraint. `ahead` is a copy that may run ahead of it, made as long as it `is_led`:
    threads use the matcher itself between a question and its answer. `masks` are those after draft tokens, which took
    `seconds_ahead` seconds."""

    matcher: Matcher
    constraint: Constraint | None = None
    end: PatternEnd = field(default_factory=lambda: PatternEnd(None))
    scored: ScoredTexts = NOTHING_SCORED
    canonical: CanonicalDraws | None = None
    is_slow: bool = False
    is_led: bool = False
    ahead: Matcher | None = None
    masks: dict[tuple[int, ...], Answer] = field(default_factory=dict)
    seconds_ahead: float = 0.0

    def leading(self, ahead: Matcher) -> _Instance:
        """Return an instance that answers about tokens that might come, with `ahead` for its matcher."""
        canonical = self.canonical and self.canonical.copy()
        return _Instance(ahead, end=self.end.copy(), scored=self.scored, canonical=canonical)

    def forget_ahead(self) -> None:
        """Drop what was known of tokens that might have come."""
        self.ahead, self.seconds_ahead = None, 0.0
        self.masks.clear()


_Due = tuple[Ask, _Instance]
_Answered = tuple[int, _Instance, Answer]


class ConstraintPool(ControllerPool):
    """Runs requests whose `controller` is a `Constraint`. `make_vocabulary` is called once, off the engine's
    thread, when the first of them comes. `clock` must be the engine's."""

    capabilities = frozenset[Capability](("lookahead", "draft_masks", "draft_filtering", "forced_text"))

    def __init__(
        self,
        make_vocabulary: Callable[[], GrammarVocabulary],
        limits: ConstraintLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        can_score: bool = True,
    ) -> None:
        limits = limits or ConstraintLimits()
        self.compiler = Compiler(make_vocabulary, limits)
        self._clock = clock
        self._can_score = can_score
        self._workers = Workers(limits.num_threads)
        self.opened: dict[str, _Instance] = {}
        self.live: dict[int, _Instance] = {}
        self._arrived = threading.Condition()
        self._answers: dict[int, Answer] = {}
        self.under_way: dict[int, _Instance] = {}
        self._end_row: bytes | None = None

    # -- coming --------------------------------------------------------------------------------------------

    def accepts(self, controller: object) -> bool:
        return isinstance(controller, Constraint)

    def open(self, request: Request) -> Future[tuple[int, ...]]:
        """Compile the constraint. The future raises `InvalidRequest` for one that cannot be used."""
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
            except BaseException as error:  # a cancelled compilation is one too
                future.set_exception(error if isinstance(error, BridleError) else _as_error(error))
            else:
                future.set_result(request.prompt)

        self.compiler.compile(constraint).add_done_callback(begin)
        return future

    def _opened(self, request: Request, constraint: Constraint, start: Matcher) -> _Instance:
        is_asked = isinstance(constraint, Choice) and constraint.scored is True
        if is_asked and not self._can_score:
            raise UnsupportedFeature("choice: this backend scores no options. Leave out scored=true.", "choice")
        scored = scored_texts(constraint, request, self.compiler, start) if self._can_score else NOTHING_SCORED
        how = request.sampling.canonical
        canonical = None if how == "off" else CanonicalDraws(how == "strict")
        return _Instance(start, constraint, _end_of(constraint, request.sampling), scored, canonical)

    def abandon(self, request: Request) -> None:
        self.opened.pop(request.id, None)

    # -- the step ------------------------------------------------------------------------------------------

    def ask(self, asks: Sequence[Ask]) -> None:
        """Handle asks: first forks, while their parents are as they were; then answers without a mask at once, and the
        others on threads."""
        for ask in asks:
            if ask.request is not None:
                self.live[ask.seq_id] = opened = self.opened.pop(ask.request.id)
                opened.is_led = bool(ask.request.sampling.speculate)
            elif ask.parent is not None:
                parent = self.live[ask.parent]
                self.live[ask.seq_id] = _Instance(
                    parent.matcher.copy(),
                    parent.constraint,
                    parent.end.copy(),
                    parent.scored,
                    parent.canonical and parent.canonical.copy(),
                    parent.is_slow,
                )
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
            answer = self._advance(instance, ask)
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
        """The remaining work of some answers, for a thread. The answers are published together, unless one of them
        takes long."""

        def run() -> None:
            done: list[_Answered] = []
            told = began = time.thread_time()
            for ask, instance in due:
                answer = self._advance(instance, ask) if is_whole else None
                done.append((ask.seq_id, instance, answer or self._masked(instance)))
                now = time.thread_time()
                instance.is_slow = instance.is_slow or now - began > SLOW_MASK_SECONDS
                if now - told > _TELL:
                    self._answer(done)
                    told, done = now, []
                began = now
            self._answer(done)

        return run

    def _advance(self, instance: _Instance, ask: Ask) -> Answer | None:
        """Commit the reported tokens; returns the answer, or None if it needs a mask."""
        matcher = instance.matcher
        began = time.thread_time()
        try:
            if ask.request is None:
                matcher.rollback(ask.backtrack)
                with fitting(ask.rewritten_by, instance.constraint):
                    matcher.commit(ask.tokens)
            if ask.final:
                return Answer(log=_last_words(matcher))
            if instance.canonical is not None:
                instance.canonical.note(ask)
            is_left = instance.end.is_over(ask.sampled, bool(ask.tokens), self.compiler.vocabulary)
            if matcher.is_complete or is_left or instance.scored.is_chosen(ask, matcher):
                return Answer(Decision.stop())
            if matcher.is_failed:
                raise ControllerError(f"the constraint failed: {matcher.failure}")
            forced = matcher.forced() if ask.may_force and not instance.scored.comes_first(matcher) else ()
            if forced and instance.canonical is not None:
                forced = instance.canonical.forced(forced, matcher, self.compiler.vocabulary)
        except Exception as error:
            return Answer() if ask.final else Answer(error=_as_error(error))
        if time.thread_time() - began > SLOW_SECONDS:
            instance.is_slow = True
        return Answer(Decision.splice(0, forced)) if forced else None

    def _masked(self, instance: _Instance) -> Answer:
        try:
            mask = instance.matcher.mask()
            if self._end_row is None:
                self._end_row = end_row(self.compiler.vocabulary)
            if mask == self._end_row or (instance.matcher.is_accepting and not mask.strip(b"\0")):
                return Answer(Decision.stop())
            return Answer(self._draw(instance, instance.matcher, mask, self.compiler.vocabulary))
        except Exception as error:
            return Answer(error=_as_error(error))

    @staticmethod
    def _draw(instance: _Instance, matcher: Matcher, mask: bytes, vocabulary: GrammarVocabulary) -> Decision:
        """The next draw, of which the grammar allows `mask`: of a whole text, or of a token."""
        chosen = instance.scored.decision(matcher, mask, vocabulary)
        if chosen is not None:
            return chosen
        decision = instance.end.draw(matcher, mask)
        if instance.canonical is None:
            return decision
        return instance.canonical.restrict(decision, matcher, mask, vocabulary)

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
        """Follow `tokens` up to one that is not allowed or ends the text. The copy that does it costs more than the
        walk, so it is made only for a sequence that was led in the last step or begins."""
        instance = self.live.get(seq_id)
        if instance is None or instance.is_slow:
            return [], False
        instance.is_led = True
        ahead, parts, place = instance.ahead, list[tuple[int, ...]](), 0
        while ahead is not None and place < len(tokens):
            try:
                part = _next_part(ahead, tokens[place])
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
        """Return what is forced after `tokens`, or else the mask there. The copy that says so then goes back, since
        `filter_draft` goes on from there."""
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
        """Return whether no thread has the matcher in use. Waits for one that has, as long as a commit may take: else
        the speed of that thread would decide whether there are drafts."""
        with self._arrived:
            return self._arrived.wait_for(lambda: seq_id not in self.under_way, SLOW_SECONDS)

    def _look_ahead(self, instance: _Instance, ahead: Matcher, tokens: tuple[int, ...]) -> Decision | None:
        """The answer after `tokens`. A copy that has none, or cannot go back, is of no use any more."""
        copied, instance.ahead = instance.leading(ahead), None
        answer = self._advance(copied, Ask(-1, tokens))
        if answer is None:
            answer = instance.masks[tokens] = self._masked(copied)
        if answer.decision is not None:
            with suppress(ControllerError):
                ahead.rollback(len(tokens))
                instance.ahead = ahead
        return answer.decision

    def lookahead(self, seq_id: int, tokens: Sequence[int]) -> list[Decision]:
        """Return the masks after each of `tokens`, with the forced ones. It stops at a token that is not allowed or
        ends the text, if something else is forced, and when it takes longer than a commit may."""
        instance = self.live.get(seq_id)
        if instance is None or instance.is_slow or seq_id in self.under_way:
            return []
        ahead, known = instance.leading(instance.matcher.copy()), list[Decision]()
        began = time.thread_time()
        place, size = 0, 1  # the tokens that are told next
        while place + size <= len(tokens):
            told = tuple(tokens[place : place + size])
            place += size
            answer = self._advance(ahead, Ask(seq_id, told)) or instance.masks.get(tuple(tokens[:place]))
            decision = (answer or self._masked(ahead)).decision
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
        """Follow each of `tokens` on a copy, as long as only one text may come. A slow grammar is not followed."""
        instance, found = self.live.get(seq_id), list[tuple[int, ...]]()
        ahead = None
        for token in tokens:
            if instance is None or instance.is_slow or seq_id in self.under_way:
                found.append(())
                continue
            ahead = ahead or instance.matcher.copy()
            num_before = ahead.num_tokens
            leading = instance.leading(ahead)
            found.append(self._forced_on(leading, token, limit))
            instance.is_slow = leading.is_slow
            try:
                ahead.rollback(ahead.num_tokens - num_before)
            except ControllerError:
                ahead = None
        return found

    def _forced_on(self, leading: _Instance, token: int, limit: int) -> tuple[int, ...]:
        forced: tuple[int, ...] = ()
        answer = self._advance(leading, Ask(-1, (token,), sampled=token))
        while len(forced) < limit and answer is not None and answer.decision is not None and answer.decision.is_forced:
            part = answer.decision.branches[0].splices[0].ff_tokens
            forced += part
            answer = self._advance(leading, Ask(-1, part))
        return forced[:limit]

    # -- going ---------------------------------------------------------------------------------------------

    def close(self, seq_ids: Sequence[int]) -> None:
        """Drop the matchers of these sequences; one in use is dropped when its work is done."""
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
    """Return the place where a text ends whose client does not ignore ends."""
    return PatternEnd(None if sampling.ignore_eos else constraint, sampling.min_tokens)


def _next_part(ahead: Matcher, token: int) -> tuple[int, ...]:
    """Commit a token, and those that are forced after it; nothing if no draw follows."""
    ahead.commit((token,))
    forced = () if ahead.is_complete else ahead.forced()
    ahead.commit(forced)
    return () if ahead.is_complete or ahead.is_failed else (token, *forced)


def _parts(masks: Sequence[_Due], num_threads: int) -> list[Sequence[_Due]]:
    """The masks in parts, two for each thread if there are enough."""
    size = min(max(1, -(-len(masks) // (2 * num_threads))), _MAX_PART)
    return [masks[start : start + size] for start in range(0, len(masks), size)]


def _last_words(matcher: Matcher) -> str:
    """A note to the client about a text that ended before its grammar did."""
    if matcher.is_failed or matcher.is_complete or matcher.is_accepting:
        return ""
    return f"the output ended after {matcher.num_tokens} tokens, before its constraint was satisfied\n"


def _as_error(error: BaseException) -> ControllerError:
    if isinstance(error, ControllerError):
        return error
    return ControllerError(f"the constraint failed: {error!r}")
