"""Free text first, then a grammar: a model reasons within a budget and answers in a format, or calls tools after a
token.

The text up to the end token is free. When its budget is used up, the end token is forced. A grammar, if there is one,
applies to the text after it. No text is rolled back.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from bridle.controllers.python import Controller, SequenceView
from bridle.engine.control.decision import Decision
from bridle.structured_output.matcher import Matcher, fitting
from bridle.structured_output.pattern_end import PatternEnd
from bridle.structured_output.pool import ConstraintPool
from bridle.structured_output.spec import Constraint
from bridle.structured_output.vocabulary import GrammarVocabulary

_INVERTED = bytes(255 - byte for byte in range(256))


class CompiledGrammar:
    """A compiled grammar, its vocabulary, and the constraint that it was made from. A copy advances independently."""

    def __init__(self, matcher: Matcher, vocabulary: GrammarVocabulary, form: Constraint) -> None:
        self.matcher, self.vocabulary, self.form = matcher, vocabulary, form
        self._end = PatternEnd(form)

    def __deepcopy__(self, memo: object) -> CompiledGrammar:
        twin = CompiledGrammar(self.matcher.copy(), self.vocabulary, self.form)
        twin._end = self._end.copy()
        return twin

    def decide(self, view: SequenceView, extra: int | None = None) -> Decision:
        """Return the decision: forced tokens, a choice among the allowed ones (and `extra`), or the end."""
        matcher, may_force = self.matcher, view.may_force
        if self._end.is_over(view.sampled, bool(view.new_tokens), self.vocabulary) or matcher.is_complete:
            return Decision.stop()
        forced = matcher.forced() if extra is None and may_force else ()
        if forced:
            return Decision.splice(0, forced)
        mask = matcher.mask()
        if extra is not None:
            return Decision.sample(_with(mask, extra))
        if matcher.must_end(mask):
            return Decision.stop()
        return self._end.draw(matcher, mask)

    def forced_after(self, token: int, limit: int) -> tuple[int, ...]:
        """Return the tokens that the grammar would force after `token`: at most `limit` tokens."""
        matcher, forced = self.matcher.copy(), tuple[int, ...]()
        part: tuple[int, ...] = (token,)
        while part and len(forced) < limit and matcher.num_allowed(part) == len(part):
            matcher.commit(part)
            part = () if matcher.is_complete else matcher.forced()
            forced += part
        return forced[:limit]

    def all_but_ends(self) -> bytes:
        """Return the mask that allows every token but the end tokens."""
        return self.vocabulary.end_row.translate(_INVERTED)


async def compile_grammar(pool: ConstraintPool, form: Constraint) -> CompiledGrammar:
    """Return the grammar of a constraint, compiled by `pool`. Raises `InvalidRequest` for an invalid constraint. If the
    caller is cancelled, it stops waiting at once."""
    matcher = await asyncio.shield(asyncio.wrap_future(pool.compiler.compile(form)))  # others may wait for it too
    return CompiledGrammar(matcher.copy(), pool.compiler.vocabulary, form)


class _Phase(Enum):
    BEFORE = "before"  # the first token decides whether there is a free part
    FREE = "free"
    GAP = "gap"  # between the end token and the text that the grammar describes
    BOUND = "bound"


@dataclass(slots=True)
class ReasoningThenGrammar(Controller):
    """Lets a model write free text before a grammar applies. `end` is the token that ends the free part; `opening`, if
    given, may begin it as the first token of the output. After `budget` tokens of the free part, the tokens `closing`,
    which end with `end`, are forced. If the grammar `then` applies to the remaining text, the tokens `gap` follow the
    end token. The output may end within the free part only if `may_stop` is true."""

    end: int
    opening: int | None = None
    budget: int | None = None
    closing: tuple[int, ...] = ()
    gap: tuple[int, ...] = ()
    then: CompiledGrammar | None = None
    may_stop: bool = True

    __name__: ClassVar[str] = "free_part"  # name in logs and traces

    #: Front ends read this attribute: text can be shown at once.
    max_rewind: ClassVar[int] = 0
    is_pure: ClassVar[bool] = True
    #: Alternatives to forced tokens can be requested, as with constraints.
    is_lenient: ClassVar[bool] = True

    _phase: _Phase = field(default=_Phase.FREE, init=False)
    _num_free: int = field(default=0, init=False)
    _num_gap: int = field(default=0, init=False)
    _is_cut: bool = field(default=False, init=False)
    _mask: bytes = field(default=b"", init=False)
    # For each token of the output: the state before the token, and whether the grammar was advanced by it.
    _past: list[tuple[_Phase, int, int, bool, bool]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._phase = _Phase.FREE if self.opening is None else _Phase.BEFORE

    def __deepcopy__(self, memo: dict[int, object]) -> ReasoningThenGrammar:
        """Return a copy without copying each entry of `_past`, which takes time; entries never change."""
        twin = copy.copy(self)
        twin._past = self._past.copy()
        twin.then = copy.deepcopy(self.then, memo)
        return twin

    def next(self, view: SequenceView) -> Decision:
        if view.num_rewound:
            self._forget(view.num_rewound)
        if len(view.tokens) > view.num_prompt:
            with fitting(view.rewritten_by, None if self.then is None else self.then.form):
                for token in view.new_tokens:
                    self._see(token)
        if self._phase is _Phase.FREE:
            return self._in_free_part()
        if self.then is None:
            return Decision.sample(self._without_end(view) if self._is_cut else None)
        if self._phase is _Phase.GAP:
            return Decision.splice(0, self.gap[self._num_gap :])
        return self.then.decide(view, self.opening if self._phase is _Phase.BEFORE else None)

    def forced_after(self, token: int, limit: int) -> tuple[int, ...]:
        """Return the tokens that would be forced after `token`, if the grammar applies to it."""
        if self.then is None or self._phase is not _Phase.BOUND:
            return ()
        return self.then.forced_after(token, limit)

    def _in_free_part(self) -> Decision:
        if self.budget is not None and self._num_free >= self.budget:
            self._is_cut = True
            return Decision.splice(0, self.closing)
        if self.then is not None and not self.may_stop:
            return Decision.sample(self.then.all_but_ends())
        return Decision.sample()

    def _without_end(self, view: SequenceView) -> bytes:
        """Return the mask that allows every token but the end token, which the model may still prefer after the forced
        end token."""
        if not self._mask:
            self._mask = view.mask_of([self.end]).translate(_INVERTED)
        return self._mask

    def _forget(self, num_tokens: int) -> None:
        """Return to the state before the last tokens, which were rolled back."""
        before = len(self._past) - num_tokens
        num_bound = sum(was_bound for *_, was_bound in self._past[before:])
        if num_bound and self.then is not None:
            self.then.matcher.rollback(num_bound)
        self._phase, self._num_free, self._num_gap, self._is_cut, _ = self._past[before]
        del self._past[before:]

    def _see(self, token: int) -> None:
        """Record one more token of the output."""
        was_bound = self._phase is _Phase.BOUND or (self._phase is _Phase.BEFORE and token != self.opening)
        self._past.append((self._phase, self._num_free, self._num_gap, self._is_cut, was_bound))
        match self._phase:
            case _Phase.BEFORE if token == self.opening:
                self._phase = _Phase.FREE
            case _Phase.FREE if token != self.end:
                self._num_free += 1
            case _Phase.FREE:
                self._phase = _Phase.GAP if self.gap else _Phase.BOUND
            case _Phase.GAP:
                self._num_gap += 1
                if self._num_gap == len(self.gap):
                    self._phase = _Phase.BOUND
            case _:
                self._phase = _Phase.BOUND
                if self.then is not None:
                    self.then.matcher.commit([token])


def _with(mask: bytes, token: int) -> bytes:
    row = bytearray(mask)
    row[token >> 3] |= 1 << (token & 7)
    return bytes(row)
