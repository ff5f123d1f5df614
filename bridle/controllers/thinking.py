"""Limits reasoning to a number of tokens, together with any other controller. After this budget, a sentence and the tag
that ends reasoning are forced, and the tag that begins it is forbidden."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from bridle.controllers.python import Controller, SequenceView
from bridle.engine.control.decision import Decision, mask_words
from bridle.errors import InvalidRequest
from bridle.safe_repr import short_repr

if TYPE_CHECKING:
    from bridle.tokenizer import Tokenizer

#: The field of requests for the sentence, and the maximum number of its characters.
FIELD, MAX_SENTENCE_CHARS = "thinking_budget_message", 2_000
#: Pairs of tags around reasoning, in the known models.
THOUGHT_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<reasoning>", "</reasoning>"))


def tags_of(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Return the tokens that begin and end reasoning, if the vocabulary has both; else None."""
    for opening, closing in THOUGHT_TAGS:
        first, last = tokenizer.id_of(opening), tokenizer.id_of(closing)
        if first is not None and last is not None:
            return first, last
    return None


def sentence_tokens(tokenizer: Tokenizer, sentence: str, tags: tuple[int, int]) -> tuple[int, ...]:
    """Return the tokens of the sentence that ends reasoning, on a line of its own unless it begins with white space.
    Raises `InvalidRequest` for a sentence that spells a tag or another special token."""
    if len(sentence) > MAX_SENTENCE_CHARS:
        raise InvalidRequest(
            f"{FIELD}: got {len(sentence)} characters; at most {MAX_SENTENCE_CHARS}. Shorten it", FIELD
        )
    text = sentence if not sentence or sentence[0].isspace() else "\n" + sentence
    tokens = tokenizer.encode(text, add_special_tokens=False)
    special = next((token for token in tokens if token in tags or token in tokenizer.special_token_ids), None)
    if special is not None:
        spelled = tokenizer.token_text(special)
        raise InvalidRequest(
            f"{FIELD}: got {short_repr(sentence)}; it may not have the special token {spelled}. Leave that out", FIELD
        )
    return tuple(tokens)


@dataclass(slots=True)
class ThinkingBudget(Controller):
    """Limits reasoning: at most `budget` tokens, and the tokens of a `sentence` that ends reasoning, may come between
    `opening` and `closing`."""

    opening: int
    closing: int
    budget: int
    sentence: tuple[int, ...] = ()

    max_rewind: ClassVar[int] = 0
    is_pure: ClassVar[bool] = True
    _mask: bytes = field(default=b"", init=False)

    def next(self, view: SequenceView) -> Decision:
        is_open, num_thoughts = self._count(view)
        if num_thoughts < self.budget:
            return Decision.sample()
        return (
            Decision.splice(0, (*self.sentence, self.closing))
            if is_open
            else Decision.sample(self._without_opening(view))
        )

    def _count(self, view: SequenceView) -> tuple[bool, int]:
        """Return whether reasoning is open, and its number of tokens. The prompt may have begun the reasoning."""
        is_open, count = False, 0
        for at, token in enumerate(view.tokens):
            if token == self.opening:
                is_open = True
            elif token == self.closing:
                is_open = False
            elif is_open and at >= view.num_prompt:
                count += 1
        return is_open, count

    def _without_opening(self, view: SequenceView) -> bytes:
        if not self._mask:
            row = bytearray(b"\xff" * (4 * mask_words(view.vocab_size)))
            row[self.opening >> 3] &= ~(1 << (self.opening & 7)) & 0xFF
            self._mask = bytes(row)
        return self._mask
