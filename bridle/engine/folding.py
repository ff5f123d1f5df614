"""Texts that grow token by token, and the same texts folded: without case, accents, invisible characters, and with one
space where there are several. So a phrase is found however it is written. Each place in a folded text has one in the
text itself.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left, bisect_right
from functools import lru_cache

#: Categories of characters that nobody sees beside others: controls, formats, and marks.
_UNSEEN = frozenset({"Cc", "Cf", "Mn", "Me"})


class GrowingText:
    """A text, in the pieces of its tokens behind a `lead`."""

    def __init__(self, lead: str = "") -> None:
        self._pieces = [lead]
        self._ends = [len(lead)]
        self.num_lead = len(lead)

    @property
    def num_chars(self) -> int:
        return self._ends[-1]

    def push(self, piece: str) -> None:
        """Add the text of a token."""
        self._pieces.append(piece)
        self._ends.append(self._ends[-1] + len(piece))

    def rewind(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        if num_tokens:
            del self._pieces[-num_tokens:], self._ends[-num_tokens:]

    def end_of(self, count: int) -> int:
        """Where the first `count` tokens end."""
        return self._ends[count]

    def tail(self, start: int) -> str:
        """The text from `start` on."""
        first = bisect_right(self._ends, start)
        if first == len(self._ends):
            return ""
        begin = self._ends[first - 1] if first else 0
        return "".join(self._pieces[first:])[start - begin :]

    def whole(self) -> str:
        """All of it."""
        return "".join(self._pieces)

    def raw(self, place: int) -> int:
        """Where the character at `place` is in the text itself."""
        return place

    def raw_end(self, place: int) -> int:
        """Where the text itself ends that is there before `place`."""
        return place

    def folded(self, place: int) -> int:
        """Where a place of the text itself is here."""
        return place

    def copy(self) -> GrowingText:
        """An independent copy."""
        twin = GrowingText()
        twin._pieces, twin._ends, twin.num_lead = self._pieces.copy(), self._ends.copy(), self.num_lead
        return twin


class FoldedText(GrowingText):
    """A text as it is compared."""

    def __init__(self, lead: str = "") -> None:
        super().__init__()
        self._places: list[int] = []  # of each character here, where it is in the text itself
        self._num_raw = [0]
        self._fold(lead)
        self._pieces, self._ends, self._num_raw = [self.whole()], [self._ends[-1]], [self._num_raw[-1]]
        self.num_lead = self.num_chars

    def push(self, piece: str) -> None:
        """Add the text of a token."""
        self._fold(piece)

    def _fold(self, piece: str) -> None:
        ends_in_space = bool(self._places) and self.tail(self.num_chars - 1) == " "
        base, made = self._num_raw[-1], []
        for number, char in enumerate(piece):
            for each in fold_char(char):
                if each == " " and ends_in_space:
                    continue
                ends_in_space = each == " "
                made.append(each)
                self._places.append(base + number)
        super().push("".join(made))
        self._num_raw.append(base + len(piece))

    def rewind(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        super().rewind(num_tokens)
        if num_tokens:
            del self._num_raw[-num_tokens:]
            del self._places[self._ends[-1] :]

    def raw(self, place: int) -> int:
        """Where the character at `place` is in the text itself."""
        return self._places[place] if place < len(self._places) else self._num_raw[-1]

    def raw_end(self, place: int) -> int:
        """Where the text itself ends that is there before `place`."""
        return self._places[place - 1] + 1 if place else 0

    def folded(self, place: int) -> int:
        """Where a place of the text itself is here."""
        return bisect_left(self._places, place)

    def copy(self) -> FoldedText:
        """An independent copy."""
        twin = FoldedText()
        twin._pieces, twin._ends, twin.num_lead = self._pieces.copy(), self._ends.copy(), self.num_lead
        twin._places, twin._num_raw = self._places.copy(), self._num_raw.copy()
        return twin


@lru_cache(8192)
def fold_char(char: str) -> str:
    """What a character is compared as; nothing for one that nobody sees."""
    if char.isspace():
        return " "
    parts = unicodedata.normalize("NFKD", char.casefold())
    return "".join(part.casefold() for part in parts if unicodedata.category(part) not in _UNSEEN)


def fold(text: str) -> str:
    """A text as it is compared."""
    return FoldedText(text).whole()
