"""Growing texts with their normalized forms. The normalization `seen` removes invisible characters and uses the
plainest form of each character. The normalization `folded` also ignores case and joins spaces. So a rule matches a text
in any spelling: with other case, spaces or invisible characters. Each position in a normalized text maps to a position
in the original text."""

from __future__ import annotations

import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

import regex

#: Normalization of a text: none, invisible characters removed, or also without differences of case.
Reading = Literal["written", "seen", "folded"]

#: Characters that are invisible next to others: controls, formats, marks, and default-ignorable characters.
_UNSEEN = regex.compile(r"[[\p{Cc}\p{Cf}\p{Mn}\p{Me}\p{DI}]--\s]+", regex.V1)
#: Maximum number of invisible characters in a row that are left out.
MAX_UNSEEN = 64
#: Replaces further invisible characters in the normalized text. No visible character is normalized to this one.
HIDDEN = "\uffff"


class NormalizedStream:
    """A growing text: the text `lead`, then the text of each token."""

    def __init__(self, lead: str = "") -> None:
        self._pieces = [lead]
        self._ends = [len(lead)]
        self.num_lead = len(lead)

    @property
    def num_chars(self) -> int:
        return self._ends[-1]

    @property
    def is_as_written(self) -> bool:
        """Return True if the normalized text still equals the original text."""
        return True

    def push(self, piece: str) -> None:
        """Add the text of a token."""
        self._pieces.append(piece)
        self._ends.append(self._ends[-1] + len(piece))

    def rewind(self, num_tokens: int) -> None:
        """Roll back the last `num_tokens` tokens."""
        if num_tokens:
            del self._pieces[-num_tokens:], self._ends[-num_tokens:]

    def end_of(self, count: int) -> int:
        """Return the position in the text after its first `count` tokens."""
        return self._ends[count]

    def tail(self, start: int) -> str:
        """Return the text from `start` on."""
        first = bisect_right(self._ends, start)
        if first == len(self._ends):
            return ""
        begin = self._ends[first - 1] if first else 0
        return "".join(self._pieces[first:])[start - begin :]

    def whole(self) -> str:
        """Return the whole text."""
        return "".join(self._pieces)

    def raw(self, place: int) -> int:
        """Return the position in the original text of the character at `place` in the normalized text."""
        return place

    def raw_end(self, place: int) -> int:
        """Return the end of the original text from which the normalized text before `place` was made."""
        return place

    def folded(self, place: int) -> int:
        """Return the position in the normalized text of a position in the original text."""
        return place

    def copy(self) -> NormalizedStream:
        """Return an independent copy."""
        twin = NormalizedStream()
        twin._pieces, twin._ends, twin.num_lead = self._pieces.copy(), self._ends.copy(), self.num_lead
        return twin


class CasefoldedStream(NormalizedStream):
    """A growing text, normalized for comparison as `folded` or `seen`. More than `MAX_UNSEEN` invisible characters in a
    row become `HIDDEN`; if they are spaces, they become one more space. So a part of the normalized text comes from a
    limited part of the original text."""

    def __init__(self, lead: str = "", reading: Reading = "folded") -> None:
        super().__init__()
        self._read = fold_char if reading == "folded" else seen_char
        self._keeps_spaces = reading != "folded"
        self._places: list[int] = []  # the position in the original text of each normalized character
        self._num_raw = [0]
        self._is_other = [False]  # after each token, whether the normalized text differs from the original
        self._fold(lead)
        self._pieces, self._ends, self._num_raw = [self.whole()], [self._ends[-1]], [self._num_raw[-1]]
        del self._is_other[0]
        self.num_lead = self.num_chars

    @property
    def is_as_written(self) -> bool:
        """Return True if the normalized text still equals the original text."""
        return not self._is_other[-1]

    def push(self, piece: str) -> None:
        """Add the text of a token."""
        self._fold(piece)

    def _fold(self, piece: str) -> None:
        if self._keeps_spaces and piece.isascii() and piece.isprintable():
            self._add(piece, range(self._num_raw[-1], self._num_raw[-1] + len(piece)), piece)
            return
        ends_in_space = bool(self._places) and self.tail(self.num_chars - 1) == " "
        base, made = self._num_raw[-1], []
        places: list[int] = []
        last = self._places[-1] if self._places else -1
        for place, char in enumerate(piece, base):
            read, is_long = self._read(char), place - last > MAX_UNSEEN
            if is_long and not read:
                read = HIDDEN
            for each in read:
                if each == " " and ends_in_space and not (self._keeps_spaces or is_long):
                    continue
                ends_in_space, last = each == " ", place
                made.append(each)
                places.append(place)
        self._add("".join(made), places, piece)

    def _add(self, read: str, places: Iterable[int], piece: str) -> None:
        """Append the normalized form of a piece of text, with the original positions of its characters."""
        super().push(read)
        self._places.extend(places)
        self._num_raw.append(self._num_raw[-1] + len(piece))
        self._is_other.append(self._is_other[-1] or read != piece)

    def rewind(self, num_tokens: int) -> None:
        """Roll back the last `num_tokens` tokens."""
        super().rewind(num_tokens)
        if num_tokens:
            del self._num_raw[-num_tokens:], self._is_other[-num_tokens:]
            del self._places[self._ends[-1] :]

    def raw(self, place: int) -> int:
        """Return the position in the original text of the character at `place` in the normalized text."""
        return self._places[place] if place < len(self._places) else self._num_raw[-1]

    def raw_end(self, place: int) -> int:
        """Return the end of the original text from which the normalized text before `place` was made."""
        return self._places[place - 1] + 1 if place else 0

    def folded(self, place: int) -> int:
        """Return the position in the normalized text of a position in the original text."""
        return bisect_left(self._places, place)

    def copy(self) -> CasefoldedStream:
        """Return an independent copy."""
        twin = CasefoldedStream()
        twin._is_other = self._is_other.copy()
        twin._read, twin._keeps_spaces = self._read, self._keeps_spaces
        twin._pieces, twin._ends, twin.num_lead = self._pieces.copy(), self._ends.copy(), self.num_lead
        twin._places, twin._num_raw = self._places.copy(), self._num_raw.copy()
        return twin


@lru_cache(8192)
def fold_char(char: str) -> str:
    """Return the case-folded form of a character; an empty string for an invisible character."""
    if char.isspace():
        return " "
    return without_unseen("".join(part.casefold() for part in unicodedata.normalize("NFKD", char.casefold())))


@lru_cache(8192)
def seen_char(char: str) -> str:
    """Return the normalized form of a character without folding its case; an empty string for an invisible
    character."""
    return without_unseen(unicodedata.normalize("NFKD", char))


def without_unseen(text: str) -> str:
    """Return a text without invisible characters."""
    kept: str = _UNSEEN.sub("", text)
    return kept.replace(HIDDEN, "\ufffd")


def read_text(text: str, reading: Reading) -> NormalizedStream:
    """Return a text after the normalization `reading` of a rule."""
    return NormalizedStream(text) if reading == "written" else CasefoldedStream(text, reading)


def fold(text: str) -> str:
    """Return a text normalized for comparison."""
    return CasefoldedStream(text).whole()
