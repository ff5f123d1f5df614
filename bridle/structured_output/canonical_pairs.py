"""Pairs of tokens that a tokenizer writes one after the other.

A tokenizer of merges writes a sequence of tokens if it writes each neighbouring pair so. A pair is tried alone, then in
contexts in which tokenizers split texts before they merge. Pairs and masks are computed when they are first needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bridle.engine.control.decision import Decision, mask_of
from bridle.structured_output.bit_rows import few_tokens
from bridle.structured_output.remembered import Remembered, State

#: A mask of more tokens is not filtered: a token that is sampled is tried instead.
MAX_FILTERED = 128
#: The most pairs that are remembered.
_MAX_PAIRS = 1 << 17
#: The most draws of each kind that are remembered, each with a mask of up to 32 kB.
_MAX_MASKS = 256
#: The most tokens, and the most masks after each, that are remembered. Masks are compared, since to hash one takes
#: many times as long.
_MAX_LAST = 128
_MAX_RECENT = 4
#: So many bytes of a text say which token it begins with.
_HEAD = 32
#: Texts that must come if one of their beginnings does, each with whether what follows does not change its tokens.
Chains = tuple[tuple[bytes, bool], ...]
#: Texts around a pair between whose tokens a tokenizer may split before it merges.
AROUND = (
    *((left, "") for left in ("", "`", "~", "*", "=", "(", " ", "a")),
    ("", "a"),
    ("", "1"),
    ("", " a"),
    ("", "-" * 28),
)
#: These do where two tokens meet inside a word, since nothing but letters changes where a word is split.
IN_WORDS = (("", ""), ("a", ""), ("", "a"))
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz")


class Spelling(Protocol):
    """The part of a vocabulary that spells texts."""

    @property
    def special(self) -> Collection[int]: ...

    def text_of(self, tokens: Sequence[int]) -> bytes: ...
    def written(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True, eq=False)
class SmallMask:
    """The part of a `mask` that may come after a token, as `tokens` and as a draw of them. Some are `doubtful`, with
    their texts, shorter ones first: if the grammar forces more after one of these, the tokenizer may write a longer
    token that the mask allows, too."""

    mask: bytes
    draw: Decision
    tokens: tuple[int, ...]
    doubtful: tuple[tuple[bytes, int], ...]


class CanonicalPairs:
    """Pairs of tokens of a vocabulary that may follow one another."""

    def __init__(self, vocabulary: Spelling) -> None:
        self._vocabulary = vocabulary
        self._known = Remembered[tuple[int, int], bool](_MAX_PAIRS)
        self._recent = Remembered[int, tuple[SmallMask, ...]](_MAX_LAST)
        self._going = Remembered[tuple[SmallMask, Chains], Decision](_MAX_MASKS)
        self._heads = Remembered[bytes, tuple[int, ...]](_MAX_PAIRS)
        #: The draws of small masks after texts that came before.
        self.draws = Remembered[State, Decision](_MAX_MASKS)

    def has(self, first: int, second: int) -> bool:
        """Return whether the tokenizer may write `second` after `first`."""
        known = self._known.get((first, second))
        if known is None:
            known = self._known[first, second] = self._is_pair(first, second)
        return known

    def filtered(self, last: int, mask: bytes) -> SmallMask | None:
        """The part of a small mask that may come after `last`; None for a large mask."""
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
        """A draw of the tokens that may come where each of these texts must come if one of its beginnings does. Those
        after which the rest belongs into one token with them are left out, but not all tokens."""
        key = small, chains
        known = self._going.get(key)
        if known is None:
            ending = {token for text, token in small.doubtful if not self._goes_on(token, text, chains)}
            left = [token for token in small.tokens if token not in ending]
            known = self._going[key] = _draw_of(left, small.mask) if ending and left else small.draw
        return known

    def _goes_on(self, token: int, text: bytes, chains: Chains) -> bool:
        """Return whether the rest after `text` does not belong into one token with `token`, which spells it."""
        chain, is_whole = next(each for each in chains if each[0].startswith(text))
        rest = chain[len(text) :]
        first = self._first_of(rest, is_whole) if rest else None
        return first is None or self.has(token, first)

    def _first_of(self, text: bytes, is_whole: bool) -> int | None:
        """The first token of a text that must come; None if it depends on what follows, because the text has one token
        and is not a whole one."""
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
            return True  # a part of a character has no text of its own
        around = IN_WORDS if _is_inside_word(head, tail) else AROUND
        return any(self._is_written(first, second, left + head, tail + right) for left, right in around)

    def _is_written(self, first: int, second: int, head: str, tail: str) -> bool:
        """Return whether the tokens of two joined texts are `first` and `second` where these meet."""
        tokens = self._vocabulary.written(head + tail)
        meeting, size = len(head.encode()), 0
        for place, token in enumerate(tokens):
            if size == meeting:
                return place > 0 and (tokens[place - 1], token) == (first, second)
            size += len(self._vocabulary.text_of((token,)))
        return size != len((head + tail).encode())  # it changes the text, so nothing is known


def _draw_of(tokens: Iterable[int], mask: bytes) -> Decision:
    return Decision.sample(mask_of(tokens, 8 * len(mask)))


def _may_have_to_go_on(text: bytes, others: Iterable[bytes]) -> bool:
    """Return whether some of the `others` are longer than `text`, begin with it, and have the same byte after it. If
    that byte differs, nothing is forced after `text`."""
    size = len(text)
    return bool(text) and len({other[size] for other in others if len(other) > size and other.startswith(text)}) == 1


def _is_inside_word(head: str, tail: str) -> bool:
    """Return whether the texts meet between two letters, or after the space before a word. After an apostrophe these
    may be parts of two words."""
    return (head == " " or (head[-1:] in _LETTERS and "'" not in head)) and tail[:1] in _LETTERS
