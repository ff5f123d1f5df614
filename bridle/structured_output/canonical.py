"""Canonical tokenization: sequences of tokens that the tokenizer itself would produce.

A mask allows every way to split a text into tokens. Most splits never occur in training, so a model that is forced into
an unusual split generates worse text. `canonical_pairs` knows which tokens may follow one another; this module
restricts masks to such tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from bridle.engine.control.decision import Branch, Decision, Outside, Splice
from bridle.engine.interfaces import Ask
from bridle.errors import ControllerError
from bridle.structured_output.canonical_pairs import CanonicalPairs, SmallMask
from bridle.structured_output.matcher import Matcher
from bridle.structured_output.vocabulary import GrammarVocabulary

#: Maximum number of allowed tokens for which the text forced after each is computed.
_MAX_FOLLOWED = 16


@dataclass(frozen=True)
class Uncanonical(Outside):
    """The set of tokens that the tokenizer would not produce after `last`."""

    pairs: CanonicalPairs
    last: int

    def __contains__(self, token: object) -> bool:
        return isinstance(token, int) and not self.pairs.has(self.last, token)


@dataclass(slots=True, eq=False)
class CanonicalDraws:
    """Restricts the sampled tokens of one output. With `is_strict`, a token that is not canonical is never sampled. If
    it is false, only small masks are filtered, and a mask that would become empty stays unchanged. `refused` are tokens
    that were sampled at this position and rolled back."""

    is_strict: bool
    refused: set[int] = field(default_factory=set)

    def copy(self) -> CanonicalDraws:
        """Return an independent copy."""
        return CanonicalDraws(self.is_strict, self.refused.copy())

    def note(self, ask: Ask) -> None:
        """Record whether the last sampled token was accepted or rolled back."""
        if ask.sampled is None or ask.tokens:
            self.refused.clear()
        else:
            self.refused.add(ask.sampled)

    def forced(self, tokens: tuple[int, ...], matcher: Matcher, vocabulary: GrammarVocabulary) -> tuple[int, ...]:
        """Return `tokens`, which the grammar forces. Return an empty tuple if the tokenizer would not produce these
        tokens here: their text may have another spelling, which is then sampled."""
        last = matcher.last_token
        return tokens if last is None or vocabulary.pairs.has(last, tokens[0]) else ()

    def restrict(self, decision: Decision, matcher: Matcher, mask: bytes, vocabulary: GrammarVocabulary) -> Decision:
        """Return `decision`, which samples under the grammar's `mask`, without tokens that are not canonical."""
        last, splices = matcher.last_token, decision.branches[0].splices
        if last is None:
            return decision
        is_open = decision.branches[0].mask is None and not self.refused  # the model may leave the pattern here
        kept = self._filtered(mask, last, matcher, vocabulary)
        if kept is not None and not is_open:
            return _drawn(kept.branches[0].mask, splices) if splices else kept
        if not (self.is_strict or kept is not None):
            return decision
        refusing = Splice(1, (), Uncanonical(mask, vocabulary.pairs, last))
        return _drawn(None if is_open else _without(self.refused, mask), (*splices, refusing))

    def _filtered(self, mask: bytes, last: int, matcher: Matcher, vocabulary: GrammarVocabulary) -> Decision | None:
        """Return a decision to sample under `mask` without refused tokens and without tokens that are not canonical.
        Return None if the mask allows many tokens."""
        draws, state = vocabulary.pairs.draws, None if self.refused else matcher.state
        known = None if state is None else draws.get(state)
        if known is not None:
            return known
        mask = _without(self.refused, mask)
        small = vocabulary.pairs.filtered(last, mask)
        if small is None:
            return None
        if small.tokens:
            draw = _going(small, matcher, vocabulary)
            if state is not None:
                draws[state] = draw
            return draw
        if self.is_strict:
            raise ControllerError(
                "canonical: got 'strict'; no token that the tokenizer would write continues the constrained text after "
                f"{vocabulary.text_of((last,))!r}. Send 'prefer', or a constraint that allows its spelling."
            )
        return Decision.sample(mask)


def _drawn(mask: bytes | None, splices: tuple[Splice, ...]) -> Decision:
    return Decision((Branch(mask=mask, splices=splices),))


def _without(tokens: Collection[int], mask: bytes) -> bytes:
    """Return `mask` without `tokens`."""
    if not tokens:
        return mask
    row = bytearray(mask)
    for token in tokens:
        row[token >> 3] &= ~(1 << (token & 7))
    return bytes(row)


def _going(small: SmallMask, matcher: Matcher, vocabulary: GrammarVocabulary) -> Decision:
    """Return a decision to sample without tokens that the tokenizer would join with the text that the grammar forces
    after them. If no token would remain, all tokens of the mask are allowed."""
    if not small.doubtful or not 1 < len(small.tokens) <= _MAX_FOLLOWED:
        return small.draw
    chains = list[tuple[bytes, bool]]()
    for text, token in small.doubtful:  # in order, so that the tokens of a chain are adjacent
        if not (chains and chains[-1][0].startswith(text)):
            chains.append(_chain(token, text, matcher.copy(), vocabulary))
    return vocabulary.pairs.going(small, tuple(chains))


def _chain(token: int, text: bytes, walk: Matcher, vocabulary: GrammarVocabulary) -> tuple[bytes, bool]:
    """Return the text of a token with the forced text after it, and whether this text is complete. The function commits
    the token to the matcher `walk`."""
    walk.commit((token,))
    forced = b"" if walk.is_complete else walk.forced_bytes()
    is_whole = bool(forced) and vocabulary.text_of(walk.forced()) == forced
    return text + forced, is_whole
