"""Canonical tokenization: tokens that the tokenizer itself would write one after the other.

A mask allows every way to put a text into tokens. Most of them never occur in training, so a model that is pushed into
one continues badly. `canonical_pairs` knows which tokens may follow one another; this file restricts masks by them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from bridle.engine.control.decision import Decision, Outside, Splice, both_masks, mask_of
from bridle.engine.interfaces import Ask
from bridle.errors import ControllerError
from bridle.structured_output.canonical_pairs import CanonicalPairs
from bridle.structured_output.matcher import Matcher
from bridle.structured_output.vocabulary import GrammarVocabulary

#: Of at most so many tokens it is found out what the grammar forces after each.
_MAX_FOLLOWED = 16


@dataclass(frozen=True)
class Uncanonical(Outside):
    """The tokens that the tokenizer would not write after `last`."""

    pairs: CanonicalPairs
    last: int

    def __contains__(self, token: object) -> bool:
        return isinstance(token, int) and not self.pairs.has(self.last, token)


@dataclass(slots=True, eq=False)
class CanonicalDraws:
    """Restricts the draws of one output. With `is_strict`, a token that is not canonical is never drawn; otherwise
    only small masks are filtered, and if nothing were left, they stay. `refused` are tokens that were taken back."""

    is_strict: bool
    refused: set[int] = field(default_factory=set)

    def copy(self) -> CanonicalDraws:
        """An independent one in the same state."""
        return CanonicalDraws(self.is_strict, self.refused.copy())

    def note(self, ask: Ask) -> None:
        """Note what became of the last draw."""
        if ask.sampled is None or ask.tokens:
            self.refused.clear()
        else:
            self.refused.add(ask.sampled)

    def forced(self, tokens: tuple[int, ...], matcher: Matcher, vocabulary: GrammarVocabulary) -> tuple[int, ...]:
        """The forced `tokens`, or none if the tokenizer would not write them here: their text may have another
        spelling, which is drawn."""
        last = matcher.last_token
        return tokens if last is None or vocabulary.pairs.has(last, tokens[0]) else ()

    def restrict(self, decision: Decision, matcher: Matcher, mask: bytes, vocabulary: GrammarVocabulary) -> Decision:
        """`decision`, a draw where the grammar allows `mask`, without the tokens that are not canonical."""
        last, branch = matcher.last_token, decision.branches[0]
        if last is None:
            return decision
        kept, is_small = self._filtered(mask, last, matcher, vocabulary)
        is_open = branch.mask is None and not self.refused  # the model may leave the pattern
        if is_small and not is_open:
            return Decision((replace(branch, mask=kept),))
        if not (self.is_strict or is_small):
            return decision
        refusing = Splice(1, (), Uncanonical(mask, vocabulary.pairs, last))
        splices = (*branch.splices, refusing)
        return Decision((replace(branch, mask=None if is_open else kept, splices=splices),))

    def _filtered(self, mask: bytes, last: int, matcher: Matcher, vocabulary: GrammarVocabulary) -> tuple[bytes, bool]:
        """`mask` without what was refused and, if it is small, what is not canonical; and whether it is small."""
        if self.refused:
            mask = both_masks(_without(self.refused, len(mask)), mask)
        kept, tokens = vocabulary.pairs.filtered(last, mask)
        if kept is None:
            return mask, False
        if 1 < len(tokens) <= _MAX_FOLLOWED:
            walk = matcher.copy()
            going = [token for token in tokens if _goes_on(token, walk, vocabulary)]
            kept = mask_of(going, 8 * len(mask)) if 0 < len(going) < len(tokens) else kept
        if tokens:
            return kept, True
        if self.is_strict:
            raise ControllerError(
                "canonical: got 'strict'; no token that the tokenizer would write continues the constrained text after "
                f"{vocabulary.text_of((last,))!r}. Send 'prefer', or a constraint that allows its spelling."
            )
        return mask, False


def _without(tokens: set[int], num_bytes: int) -> bytes:
    row = bytearray(b"\xff" * num_bytes)
    for token in tokens:
        row[token >> 3] &= ~(1 << (token & 7))
    return bytes(row)


def _goes_on(token: int, walk: Matcher, vocabulary: GrammarVocabulary) -> bool:
    """Return whether what the grammar forces after `token` does not belong into one token with it. The matcher is left
    as it was."""
    if token in vocabulary.special:
        return True
    walk.commit((token,))
    forced = () if walk.is_complete else walk.forced()
    walk.rollback(1)
    return not forced or vocabulary.pairs.has(token, forced[0])
