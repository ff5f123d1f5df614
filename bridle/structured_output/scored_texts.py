"""The texts that are scored as a whole: whole outputs, or the finite sets of texts inside an output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bridle.engine.control.decision import Decision
from bridle.engine.interfaces import Ask
from bridle.engine.request import Request
from bridle.structured_output.compiler import Compiler
from bridle.structured_output.finite import can_score, scored_options
from bridle.structured_output.finite_sets import FiniteSet, finite_sets, next_options
from bridle.structured_output.matcher import Matcher
from bridle.structured_output.spec import Choice, Constraint
from bridle.structured_output.vocabulary import GrammarVocabulary


@dataclass(frozen=True, slots=True)
class ScoredTexts:
    """If the whole output is one of a few texts, `options` are their tokens. With `is_reported`, the client gets the
    probabilities of these texts. With `must_score`, the client requires scores, so a mask cannot be used instead. If
    the whole output is not one of a few texts, `sets` are the finite sets that may occur anywhere in it."""

    options: tuple[tuple[int, ...], ...] = ()
    is_reported: bool = False
    must_score: bool = False
    sets: Sequence[FiniteSet] = ()

    def comes_first(self, matcher: Matcher) -> bool:
        """Return whether the whole output is one of a few texts, and no token was generated yet."""
        return bool(self.options) and not matcher.num_tokens

    def decision(self, matcher: Matcher, mask: bytes, vocabulary: GrammarVocabulary) -> Decision | None:
        """Return the decision to choose among the next whole texts, or None. `mask` has the tokens that the matcher
        allows."""
        if self.comes_first(matcher):
            return Decision.choose(self.options, None if self.must_score else mask, is_reported=self.is_reported)
        if not self.sets:
            return None
        options = next_options(self.sets, matcher, mask, vocabulary)
        return Decision.choose(options, mask) if options else None

    def is_chosen(self, ask: Ask, matcher: Matcher) -> bool:
        """Return whether the engine, without sampling, has appended a whole text, which ends the output."""
        if not self.options or ask.sampled is not None:
            return False
        return matcher.num_tokens == len(ask.tokens) and ask.tokens in self.options


#: No scored texts: only masks are used.
NOTHING_SCORED = ScoredTexts()


def scored_texts(constraint: Constraint, request: Request, compiler: Compiler, start: Matcher) -> ScoredTexts:
    """Return the texts of a request that are scored as a whole. Raises `UnsupportedFeature` or `InvalidRequest` if the
    request requires scores that cannot be computed."""
    options = scored_options(constraint, request, lambda: compiler.vocabulary, start)
    if options:
        is_asked = isinstance(constraint, Choice) and constraint.scored is True
        return ScoredTexts(options, is_asked or request.sampling.logprobs is not None, is_asked)
    sets = () if isinstance(constraint, Choice) or not can_score(request) else finite_sets(constraint)
    return ScoredTexts(sets=sets) if sets else NOTHING_SCORED
