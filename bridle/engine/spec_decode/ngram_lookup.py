"""Draft tokens without a model: the tokens that followed an earlier occurrence of the last few tokens.

The searched text is the client's prediction, if there is one, and then the prompt and the output. If the output copies
from this text (edited code, quotations, JSON keys), the draft continues the copy. This method is called prompt lookup
(Saxena, 2023; `prompt_lookup_num_tokens` in transformers). Among the latest few occurrences of the last `NGRAM` tokens,
the one with the longest common history is used.

If the output differs from the copied text, the copy resumes a few tokens later, where both agree again. If output and
copied text do not agree again, the copy resumes after the changed token, because most edits are small.

Every token of the text takes one entry in a dictionary. A rollback exactly undoes the appending of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: Number of tokens that must agree before a copy is expected.
NGRAM = 3
#: Number of earlier positions to compare, the latest first, and number of tokens to compare at each.
_MAX_PLACES = 8
_MAX_AGREEMENT = 32
#: Number of tokens that a copy may skip to resume, and of mismatches in a row before the copy ends.
_MAX_GAP, _MAX_MISSES = 8, 2
_Key = tuple[int, ...]


class NgramIndex:
    """The text of one sequence, searchable by its last few tokens. `prediction` is the output that the client
    expects."""

    def __init__(self, prediction: Sequence[int] = ()) -> None:
        self.text = list(prediction)
        self._num_predicted = len(self.text)
        self.latest: dict[_Key, int] = {}  # an n-gram -> the position after its latest occurrence
        self.before: list[int | None] = []  # per position of the text: the occurrence before that one
        self._index(self._num_predicted)
        self._next = 0 if self.text else None  # position at which the current copy continues
        self._num_misses = 0  # number of mismatches in a row
        self._agreement = NGRAM  # number of matching tokens since the last mismatch

    def follow(self, tokens: Sequence[int], num_prompt: int, limit: int) -> None:
        """Append those of `tokens` that are new, at most `limit` in one call. The first `num_prompt` of `tokens` are
        the prompt.

        The caller must report rolled-back tokens with `cut`.
        """
        first = self._num_predicted
        known = len(self.text) - first
        fresh = tokens[known : known + limit]
        for token in fresh[max(num_prompt - known, 0) :]:
            if self._next is None:
                break
            self._next = self._behind(token, self._next)
        self.text += fresh
        self._index(len(self.text))

    def _behind(self, token: int, place: int) -> int | None:
        """Return the position at which the copy at `place` continues after `token`, or None."""
        text = self.text
        if place < len(text) and text[place] == token:
            self._num_misses = 0
            self._agreement += 1
            return place + 1
        self._num_misses += 1
        self._agreement = 0
        if self._num_misses > _MAX_MISSES or place + 1 >= len(text):
            return None
        near = text[place + 1 : place + 1 + _MAX_GAP]
        if token in near:
            return place + near.index(token) + 2
        behind = text[max(place - self._num_misses, 0) : place]
        return place if self._num_misses > 1 and token in behind else place + 1

    def cut(self, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens of the sequence."""
        size = self._num_predicted + num_tokens
        while len(self.before) > size:
            end = len(self.before)
            before = self.before.pop()
            if end >= NGRAM:
                key = tuple(self.text[end - NGRAM : end])
                if before is None:
                    del self.latest[key]
                else:
                    self.latest[key] = before
        if len(self.text) > size:
            del self.text[size:]
            self._next = None

    def __len__(self) -> int:
        """Return the number of tokens of the sequence that are indexed."""
        return len(self.text) - self._num_predicted

    def draft(self, limit: int) -> tuple[int, ...]:
        """Return at most `limit` tokens that may come next. If the last tokens did not occur earlier, the result is
        empty."""
        if self._next is None or self._agreement < NGRAM:
            found = self._search()
            if found is not None:
                self._next, self._num_misses, self._agreement = found, 0, NGRAM
        start = self._next
        if start is None:
            return ()
        part = self.text[start : start + limit]
        while part and len(part) < limit and start + len(part) >= len(self.text):
            part += part[: limit - len(part)]  # the copy has reached its own beginning: the text repeats itself
        return tuple(part)

    def draft_after(self, tokens: Iterable[int], limit: int) -> tuple[int, ...]:
        """Return the draft for the case that `tokens` come next. `tokens` are not stored."""
        size, going_on = len(self), (self._next, self._num_misses, self._agreement)
        self.text += tokens
        self._index(len(self.text))
        self._next = None
        found = self.draft(limit)
        self.cut(size)
        self._next, self._num_misses, self._agreement = going_on
        return found

    def _index(self, end: int) -> None:
        text, before, latest = self.text, self.before, self.latest
        before += [None] * (min(end, NGRAM - 1) - len(before))
        first = len(before) - NGRAM + 1  # start of the next n-gram
        for last, key in enumerate(
            zip(*(text[first + place : end] for place in range(NGRAM)), strict=False), first + NGRAM
        ):
            before.append(latest.get(key))
            latest[key] = last

    def _search(self) -> int | None:
        """Return the position after the longest earlier copy of the end of the text."""
        text, best, most = self.text, None, 0
        place = self.before[-1] if self.before else None
        for _ in range(_MAX_PLACES):
            if place is None:
                break
            agreement = _agreement(text, place)
            if agreement > most:
                best, most = place, agreement
            place = self.before[place - 1]
        return best


def _agreement(text: Sequence[int], place: int) -> int:
    """Return how many tokens before `place` equal the last tokens of the text."""
    size, most = len(text), min(place, _MAX_AGREEMENT)
    return next((n for n in range(most) if text[place - 1 - n] != text[size - 1 - n]), most)
