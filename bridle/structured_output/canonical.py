"""Canonical tokenization: tokens that the tokenizer itself would write one after the other.

A mask allows every way to put a text into tokens. Most of them never occur in training, so a model that is pushed into
one continues badly. `canonical_pairs` knows which tokens may follow one another; this file restricts masks by them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from bridle.engine.control.decision import Decision, Outside, Splice, both_masks, mask_of
from bridle.engine.interfaces import Ask
from bridle.errors import ControllerError
from bridle.structured_output.canonical_pairs import CanonicalPairs, SmallMask
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
        small = vocabulary.pairs.filtered(last, mask)
        if small is None:
            return mask, False
        if small.tokens:
            return _going(small, matcher, vocabulary), True
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


def _going(small: SmallMask, matcher: Matcher, vocabulary: GrammarVocabulary) -> bytes:
    """The mask without the tokens after which the grammar forces what belongs into one token with them; all of it, if
    nothing else is left."""
    if not small.doubtful or not 1 < len(small.tokens) <= _MAX_FOLLOWED:
        return small.kept
    walk, chains, ending = matcher.copy(), list[_Chain](), set[int]()
    for text, token in small.doubtful:
        chain = next((each for each in chains if each.text.startswith(text)), None)
        if chain is None:
            chain = _followed(token, text, walk, vocabulary)
            chains.append(chain)
        if not chain.goes_on(text, token, vocabulary.pairs):
            ending.add(token)
    left = [token for token in small.tokens if token not in ending]
    return mask_of(left, 8 * len(small.kept)) if ending and left else small.kept


@dataclass(frozen=True, slots=True)
class _Chain:
    """A text that must come if one of its beginnings does. It `is_whole` if what follows does not change its tokens."""

    text: bytes
    is_whole: bool

    def goes_on(self, text: bytes, token: int, pairs: CanonicalPairs) -> bool:
        """Return whether the rest after `text` does not belong into one token with `token`, which spells it."""
        rest = self.text[len(text) :]
        first = pairs.first_of(rest, self.is_whole) if rest else None
        return first is None or pairs.has(token, first)


def _followed(token: int, text: bytes, walk: Matcher, vocabulary: GrammarVocabulary) -> _Chain:
    """Return the text that the grammar forces after a token. The matcher does not change."""
    walk.commit((token,))
    forced = b"" if walk.is_complete else walk.forced_bytes()
    is_whole = bool(forced) and vocabulary.text_of(walk.forced()) == forced
    walk.rollback(1)
    return _Chain(text + forced, is_whole)
