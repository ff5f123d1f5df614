"""The state of one output under its constraint: decisions after reported tokens, and predictions for draft tokens.

Only one thread at a time uses an object; `ConstraintPool` decides which thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from bridle.engine.control.decision import Decision
from bridle.engine.interfaces import Answer, Ask
from bridle.errors import ControllerError
from bridle.structured_output.canonical import CanonicalDraws
from bridle.structured_output.matcher import Matcher, fitting
from bridle.structured_output.pattern_end import PatternEnd
from bridle.structured_output.scored_texts import NOTHING_SCORED, ScoredTexts
from bridle.structured_output.spec import Constraint

#: Seconds of processor time of a commit, or of a mask, above which a sequence is no longer handled on the engine's
#: thread.
SLOW_SECONDS = 0.002
SLOW_MASK_SECONDS = 0.01


@dataclass(slots=True, eq=False)
class ConstrainedSequence:
    """One output under its constraint. `ahead` is a copy of the matcher for draft tokens, made while `is_led` is true.
    While a decision is awaited, another thread may use the matcher itself. `masks` are the answers after draft tokens,
    whose computation took `seconds_ahead` seconds."""

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

    def copy(self) -> ConstrainedSequence:
        """Return a copy of the state, for a fork of the output."""
        twin = self.leading(self.matcher.copy())
        twin.constraint, twin.is_slow = self.constraint, self.is_slow
        return twin

    def leading(self, ahead: Matcher) -> ConstrainedSequence:
        """Return a sequence that computes decisions after draft tokens, with `ahead` as its matcher."""
        canonical = self.canonical and self.canonical.copy()
        return ConstrainedSequence(ahead, end=self.end.copy(), scored=self.scored, canonical=canonical)

    def forget_ahead(self) -> None:
        """Drop the predictions for draft tokens that were not sampled."""
        self.ahead, self.seconds_ahead = None, 0.0
        self.masks.clear()

    def advance(self, ask: Ask) -> Answer | None:
        """Commit the reported tokens. Returns the answer, or None if the answer needs a mask."""
        began = time.thread_time()
        try:
            if ask.request is None:
                self.matcher.rollback(ask.backtrack)
                with fitting(ask.rewritten_by, self.constraint):
                    self.matcher.commit(ask.tokens)
            if ask.final:
                return Answer(log=_last_words(self.matcher))
            if self._is_over(ask):
                return Answer(Decision.stop())
            forced = self._forced(ask)
        except Exception as error:
            return Answer() if ask.final else Answer(error=as_controller_error(error))
        if time.thread_time() - began > SLOW_SECONDS:
            self.is_slow = True
        return Answer(Decision.splice(0, forced)) if forced else None

    def _is_over(self, ask: Ask) -> bool:
        matcher = self.matcher
        if self.canonical is not None:
            self.canonical.note(ask)
        is_left = self.end.is_over(ask.sampled, bool(ask.tokens), matcher.vocabulary)
        if matcher.is_complete or is_left or self.scored.is_chosen(ask, matcher):
            return True
        if matcher.is_failed:
            raise ControllerError(f"the constraint failed: {matcher.failure}")
        return False

    def _forced(self, ask: Ask) -> tuple[int, ...]:
        matcher = self.matcher
        if not ask.may_force or self.scored.comes_first(matcher):
            return ()
        forced = matcher.forced()
        if forced and self.canonical is not None:
            forced = self.canonical.forced(forced, matcher, matcher.vocabulary)
        return forced

    def masked(self) -> Answer:
        """Return the decision that lets the engine sample the tokens that the grammar allows."""
        try:
            mask = self.matcher.mask()
            if self.matcher.must_end(mask):
                return Answer(Decision.stop())
            return Answer(self._draw(mask))
        except Exception as error:
            return Answer(error=as_controller_error(error))

    def _draw(self, mask: bytes) -> Decision:
        """Return the next decision, to sample one of several whole texts, or a token; the grammar allows `mask`."""
        matcher, vocabulary = self.matcher, self.matcher.vocabulary
        chosen = self.scored.decision(matcher, mask, vocabulary)
        if chosen is not None:
            return chosen
        decision = self.end.draw(matcher, mask)
        return decision if self.canonical is None else self.canonical.restrict(decision, matcher, mask, vocabulary)

    def forced_on(self, token: int, limit: int) -> tuple[int, ...]:
        """Commit `token`, and return at most `limit` tokens that are forced after it."""
        forced: tuple[int, ...] = ()
        answer = self.advance(Ask(-1, (token,), sampled=token))
        while len(forced) < limit and answer is not None and answer.decision is not None and answer.decision.is_forced:
            part = answer.decision.branches[0].splices[0].ff_tokens
            forced += part
            answer = self.advance(Ask(-1, part))
        return forced[:limit]


def next_part(ahead: Matcher, token: int) -> tuple[int, ...]:
    """Commit a token and the tokens that are forced after it. Returns an empty tuple if no token is sampled after
    them."""
    ahead.commit((token,))
    forced = () if ahead.is_complete else ahead.forced()
    ahead.commit(forced)
    return () if ahead.is_complete or ahead.is_failed else (token, *forced)


def as_controller_error(error: BaseException) -> ControllerError:
    """Convert an error to a controller error."""
    if isinstance(error, ControllerError):
        return error
    return ControllerError(f"the constraint failed: {error!r}")


def _last_words(matcher: Matcher) -> str:
    """Return a note to the client if the output ended before its grammar was complete, otherwise an empty string."""
    if matcher.is_failed or matcher.is_complete or matcher.is_accepting:
        return ""
    return f"the output ended after {matcher.num_tokens} tokens, before its constraint was satisfied\n"
