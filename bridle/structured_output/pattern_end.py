"""Decides where an output under a regex ends: where the text matches and the model would continue outside the pattern.

With a mask alone, a model would continue where it wants to end the text. For example, the pattern ` [A-Z][a-z]+`
forbids the full stop that the model prefers after ` Paris`. The mask would let the most probable letter follow instead.
Where the text may end, the engine therefore samples the model's own choice without the mask. A sampled token that the
pattern allows stays. Any other token is rolled back before a client sees it, and the text ends. If a rolled-back token
begins with characters that the pattern allows, the text continues, sampled with the mask.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridle.engine.control.decision import Decision, Outside, Splice, mask_allows
from bridle.structured_output.matcher import Matcher
from bridle.structured_output.spec import Constraint, Regex
from bridle.structured_output.vocabulary import GrammarVocabulary


def ends_with_model(constraint: object) -> bool:
    """Return whether a text under this constraint ends where the model leaves the pattern."""
    return isinstance(constraint, Regex) and not constraint.longest


@dataclass(slots=True)
class PatternEnd:
    """Follows one output. The text cannot end before `min_tokens` tokens or before the first token. `mask` is the
    pattern's mask at the last sample that was drawn without it; `must_mask` says that the next sample uses the mask."""

    constraint: Constraint | None
    min_tokens: int = 0
    mask: bytes = b""
    must_mask: bool = False

    def copy(self) -> PatternEnd:
        """Return an independent copy."""
        return PatternEnd(self.constraint, self.min_tokens, self.mask, self.must_mask)

    def is_over(self, sampled: int | None, is_kept: bool, vocabulary: GrammarVocabulary) -> bool:
        """Record the last sampled token. Return whether this token left the pattern, so that the text is over."""
        mask, self.mask, self.must_mask = self.mask, b"", False
        if not mask or sampled is None or is_kept or mask_allows(mask, sampled):
            return False
        self.must_mask = _begins_inside(mask, sampled, vocabulary)
        return not self.must_mask

    def draw(self, matcher: Matcher, mask: bytes) -> Decision:
        """Return the decision for the next token, for which the pattern allows `mask`."""
        is_open = 0 < matcher.num_tokens >= self.min_tokens and ends_with_model(self.constraint)
        if self.must_mask or not is_open or not matcher.is_accepting:
            return Decision.sample(mask)
        self.mask = mask
        return Decision.sample(splices=(Splice(1, (), Outside(mask)),))


def _begins_inside(mask: bytes, token: int, vocabulary: GrammarVocabulary) -> bool:
    """Return whether a forbidden token begins with a complete character that the mask allows."""
    data = vocabulary.text_of((token,))
    heads = (vocabulary.token_of(data[:size]) for size in range(1, len(data)) if _is_text(data[:size]))
    return any(head is not None and mask_allows(mask, head) for head in heads)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
