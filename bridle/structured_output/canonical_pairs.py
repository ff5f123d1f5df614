"""Pairs of tokens that a tokenizer may produce one after the other.

A tokenizer with merges produces a sequence of tokens if it produces each pair of neighbours. A pair is tested alone,
then in contexts in which tokenizers split texts before they merge. Pairs and masks are computed when they are first
needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bridle.engine.control.decision import Decision, mask_of
from bridle.structured_output.bit_rows import few_tokens
from bridle.structured_output.remembered import Remembered, State

#: Maximum number of tokens of a mask that is filtered. Under a larger mask, the sampled token is checked instead.
MAX_FILTERED = 128
#: Maximum number of remembered pairs.
_MAX_PAIRS = 1 << 17
#: Maximum number of remembered decisions of each kind, each with a mask of up to 32 kB.
_MAX_MASKS = 256
#: Maximum number of remembered last tokens, and of masks after each. Masks are compared, because hashing one takes many
#: times as long.
_MAX_LAST = 128
_MAX_RECENT = 4
#: Number of bytes of a text that determine its first token.
_HEAD = 32
#: Forced texts, each with whether it is complete, so that later text does not change its tokens.
Chains = tuple[tuple[bytes, bool], ...]
#: Texts before and after a pair: contexts in which a tokenizer may split between the two tokens before it merges.
AROUND = (
    *((left, "") for left in ("", "`", "~", "*", "=", "(", " ", "a")),
    ("", "a"),
    ("", "1"),
    ("", " a"),
    ("", "-" * 28),
)
#: Contexts for two tokens that meet inside a word, where only letters change where a word is split.
IN_WORDS = (("", ""), ("a", ""), ("", "a"))
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz")


class Spelling(Protocol):
    """The part of a vocabulary's interface that tokenizes texts."""

    @property
    def special(self) -> Collection[int]: ...

    def text_of(self, tokens: Sequence[int]) -> bytes: ...
    def written(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True, eq=False)
class SmallMask:
    """The part of a `mask` that may come after a token, as `tokens` and as a decision `draw` that samples them.
    `doubtful` are the tokens whose text begins longer allowed tokens, with their texts, shorter ones first. If the
    grammar forces more text after a doubtful token, the tokenizer may produce the longer token instead."""

    mask: bytes
    draw: Decision
    tokens: tuple[int, ...]
    doubtful: tuple[tuple[bytes, int], ...]


class CanonicalPairs:
    """Pairs of tokens of a vocabulary that may follow one another in canonical text."""

    def __init__(self, vocabulary: Spelling) -> None:
        self._vocabulary = vocabulary
        self._known = Remembered[tuple[int, int], bool](_MAX_PAIRS)
        self._recent = Remembered[int, tuple[SmallMask, ...]](_MAX_LAST)
        self._going = Remembered[tuple[SmallMask, Chains], Decision](_MAX_MASKS)
        self._heads = Remembered[bytes, tuple[int, ...]](_MAX_PAIRS)
        #: Decisions for small masks, by the forced texts.
        self.draws = Remembered[State, Decision](_MAX_MASKS)

    def has(self, first: int, second: int) -> bool:
        """Return whether the tokenizer may produce `second` after `first`."""
        known = self._known.get((first, second))
        if known is None:
            known = self._known[first, second] = self._is_pair(first, second)
        return known

    def filtered(self, last: int, mask: bytes) -> SmallMask | None:
        """Return the part of a small mask that may come after `last`; None for a large mask."""
        recent = self._recent.get(last, ())
        for known in recent:
            if known.mask == mask:
                return known
        allowed = few_tokens(mask, MAX_FILTERED)
        if allowed is None:
            return None
        small = self._small_mask(last, mask, allowed)
        self._recent[last] = (small, *recent[: _MAX_RECENT - 1])
        return small

    def _small_mask(self, last: int, mask: bytes, allowed: Iterable[int]) -> SmallMask:
        texts = {token: self._vocabulary.text_of((token,)) for token in allowed}
        tokens = tuple(token for token in texts if self.has(last, token))
        doubtful = [(texts[token], token) for token in tokens if _may_have_to_go_on(texts[token], texts.values())]
        return SmallMask(mask, _draw_of(tokens, mask), tokens, tuple(sorted(doubtful)))

    def going(self, small: SmallMask, chains: Chains) -> Decision:
        """Return a decision that samples the tokens of `small` that may come next, given the texts `chains`, which the
        grammar forces. Tokens that the tokenizer would join with the forced text after them are left out, unless no
        token would remain."""
        key = small, chains
        known = self._going.get(key)
        if known is None:
            ending = {token for text, token in small.doubtful if not self._goes_on(token, text, chains)}
            left = [token for token in small.tokens if token not in ending]
            known = self._going[key] = _draw_of(left, small.mask) if ending and left else small.draw
        return known

    def _goes_on(self, token: int, text: bytes, chains: Chains) -> bool:
        """Return whether the tokenizer keeps `token`, whose text is `text`, separate from the forced text after it."""
        chain, is_whole = next(each for each in chains if each[0].startswith(text))
        rest = chain[len(text) :]
        first = self._first_of(rest, is_whole) if rest else None
        return first is None or self.has(token, first)

    def _first_of(self, text: bytes, is_whole: bool) -> int | None:
        """Return the first token of a forced text. Return None if the token depends on later text, because the text is
        incomplete and has a single token."""
        head = text[:_HEAD]
        tokens = self._heads.get(head)
        if tokens is None:
            tokens = self._heads[head] = tuple(self._vocabulary.written(head.decode("utf-8", "ignore"))[:2])
        return tokens[0] if len(tokens) > 1 or (tokens and is_whole) else None

    def _is_pair(self, first: int, second: int) -> bool:
        special = self._vocabulary.special
        if first in special or second in special:
            return True
        try:
            head, tail = (self._vocabulary.text_of((token,)).decode() for token in (first, second))
        except UnicodeDecodeError:
            return True  # a part of a character has no text
        around = IN_WORDS if _is_inside_word(head, tail) else AROUND
        return any(self._is_written(first, second, left + head, tail + right) for left, right in around)

    def _is_written(self, first: int, second: int, head: str, tail: str) -> bool:
        """Return whether `first` and `second` are the tokens around the boundary of the joined texts `head` and
        `tail`."""
        tokens = self._vocabulary.written(head + tail)
        meeting, size = len(head.encode()), 0
        for place, token in enumerate(tokens):
            if size == meeting:
                return place > 0 and (tokens[place - 1], token) == (first, second)
            size += len(self._vocabulary.text_of((token,)))
        return size != len((head + tail).encode())  # the tokenizer changes the text, so nothing is known


def _draw_of(tokens: Iterable[int], mask: bytes) -> Decision:
    return Decision.sample(mask_of(tokens, 8 * len(mask)))


def _may_have_to_go_on(text: bytes, others: Iterable[bytes]) -> bool:
    """Return whether some of `others` begin with `text` and are longer, and all of these have the same next byte. If
    their next bytes differ, the grammar forces no text after `text`."""
    size = len(text)
    return bool(text) and len({other[size] for other in others if len(other) > size and other.startswith(text)}) == 1


def _is_inside_word(head: str, tail: str) -> bool:
    """Return whether `head` and `tail` meet between two letters, or after the space before a word. Texts before and
    after an apostrophe may be parts of two words."""
    return (head == " " or (head[-1:] in _LETTERS and "'" not in head)) and tail[:1] in _LETTERS
