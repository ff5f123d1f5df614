"""Finds stop strings and banned phrases in the text of one output. Text that may still become a stop string or a banned
phrase is held back.

This module is between the detokenizer (`TextState`) and the events. Text that could begin a stop string is held back
until the next tokens decide. A rollback removes held text first, and reports how much of the released text is removed.
This module uses no wire formats.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from bridle.engine.guardrails.guardrail_matcher import GuardrailMatcher, first_token
from bridle.engine.guardrails.guardrails import GuardrailMatch, TextRule
from bridle.engine.interfaces import TextState
from bridle.engine.outputs.repeats import MAX_CHARS, Repeats

#: Stop reason of an output that repeated a part of its text.
REPEATED = "repeated"


class Released(NamedTuple):
    """The effect of one token on the text of an output. `text` is the text released now; `stop` is the stop string that
    the token completes.

    `num_taken` is the number of characters that were released earlier but belong to the stop string. `num_taken` can be
    positive only after a rollback changed the text after the released characters. `num_banned` is the number of tokens
    to remove at the end, because of a banned phrase or the match `hit` of a guardrail. If `num_banned` is positive, no
    text is released. If `num_banned` is 0, a match `hit` ends the output.
    """

    text: str
    stop: str | None = None
    num_taken: int = 0
    num_banned: int = 0
    hit: GuardrailMatch | None = None


class OutputText:
    """Growing text of one output, token by token. `watch` is the matcher that checks this text against the operator's
    guardrails."""

    def __init__(
        self,
        state: TextState,
        stop: Sequence[str],
        include_stop: bool,
        banned: Sequence[str] = (),
        watch: GuardrailMatcher | None = None,
        repeats: Repeats | None = None,
    ) -> None:
        self._state = state
        self._watch = watch
        self._own_stop = tuple(stop)
        self._repeats = repeats
        self._banned = tuple(banned)
        self._include_stop = include_stop
        # if True, tokens are sent only once none of their text may be removed
        self.may_go = bool(banned) or watch is not None
        self._renew_stops()
        self._pieces: list[str] = []  # characters that became certain with each token
        self._num_chars = 0
        self._num_released = 0
        self._is_closed = False  # True once a stop string ended the text
        self.closed_by = "", ""  # name and version of the policy that changed its end
        # For each token: where the text ends after it, whether it was forced, and whether it ends inside a character.
        # Kept only if tokens may have to be removed.
        self._ends: list[int] = []
        self._forced: list[bool] = []
        self._is_cut: list[bool] = []
        self.num_told = 0  # tokens that were sent to the client and stay
        self.goes_by_last = False  # ban a phrase's last sampled token, not its first

    @property
    def num_settled(self) -> int:
        """Return the number of tokens whose text is released completely. No stop string or banned phrase can begin in
        this text, even if later tokens are removed."""
        count = bisect_right(self._ends, self._num_released)
        while self.num_told < count < len(self._ends) and self._partial_match(self._until(self._ends[count - 1])):
            count -= 1
        if self._watch is None:
            return count
        count = self._watch.num_settled(count, self.num_told)
        while self.num_told < count and self._is_cut[count - 1]:  # what replaces its other part has to begin before it
            count = self._watch.num_settled(count - 1, self.num_told)
        return count

    def split(self, hidden: str, num_after: int, num_tokens: int) -> list[str]:
        """Split `hidden`, which is released but unsent text, at the ends of the next `num_tokens` tokens. The last part
        is the text after these tokens; `num_after` further characters were released after `hidden`."""
        start = self._num_released - num_after - len(hidden)
        ends = self._ends[self.num_told : self.num_told + num_tokens]
        places = [0, *(min(max(end - start, 0), len(hidden)) for end in ends), len(hidden)]
        self.num_told += num_tokens
        return [hidden[begin:stop] for begin, stop in pairwise(places)]

    def push(self, token: int, forced: bool = False) -> Released:
        """Append a token. A `forced` token stays, even if it completes a banned phrase."""
        piece = self._state.push(token)
        self._pieces.append(piece)
        self._num_chars += len(piece)
        if self.may_go:
            self._ends.append(self._num_chars)
            self._forced.append(forced)
            self._is_cut.append(self._state.is_waiting)
        hit = None if self._watch is None else self._watch.push(piece)
        if hit is not None and hit.is_replaced and self._num_until(hit.end) is None:
            hit = None  # the match is found again with the remaining bytes of that character
        if hit is not None and isinstance(hit.rule, TextRule):
            return Released("", num_banned=self._num_hit(hit), hit=hit)
        if self._window:
            released = self._release(len(piece))
            return released if hit is None else released._replace(hit=hit)
        self._num_released = self._num_chars
        return Released(piece, hit=hit)

    def push_plain(self, token: int) -> str:
        """Append a token to a text without stop strings, bans and guardrails (`is_plain`). Returns the released
        text."""
        piece = self._state.push(token)
        self._pieces.append(piece)
        self._num_chars += len(piece)
        self._num_released = self._num_chars
        return piece

    def _num_hit(self, hit: GuardrailMatch) -> int:
        """Return how many tokens to remove for the match of a guardrail. If other tokens will be sampled, the first
        removed token must be a sampled token, if there is one. If the match is replaced, no character may be split."""
        first = first_token(self._ends, hit.start, self.num_told)
        while hit.is_replaced and first > self.num_told and self._is_cut[first - 1]:
            first -= 1
        if hit.takes_another_way:
            drawn = [at for at in range(first, len(self._ends)) if not self._forced[at]]
            first = drawn[-1 if self.goes_by_last else 0] if drawn else first
        return len(self._ends) - min(first, len(self._ends) - 1)

    def is_drawn(self, num_tokens: int) -> bool:
        """Return whether the first of the last `num_tokens` tokens was sampled."""
        return not self._forced[-num_tokens]

    def around(self, hit: GuardrailMatch, num_tokens: int) -> tuple[str, str, int]:
        """Return the text before a match in the last `num_tokens` tokens, and the text after the match up to a token's
        end. The last result is the number of tokens after the end of the returned text."""
        assert self._watch is not None
        begin = self._ends[-num_tokens - 1] if num_tokens < len(self._ends) else 0
        num_until = self._num_until(hit.end) or len(self._ends)
        behind = self._watch.slice(hit.end, self._ends[num_until - 1])
        return self._watch.slice(begin, hit.start), behind, len(self._ends) - num_until

    def _num_until(self, end: int) -> int | None:
        """Return how many tokens contain the text up to `end`; None if the last of these tokens would split a
        character."""
        first = bisect_left(self._ends, end)
        return next((at + 1 for at in range(first, len(self._ends)) if not self._is_cut[at]), None)

    def close(self, hidden: str) -> tuple[int, str] | None:
        """End the text: what may become a stop string or banned phrase now counts as one. Returns the number of tokens
        to remove, and the text that replaces these tokens and the whole `hidden` text. If no tokens are removed, the
        result is None."""
        hit = None if self._watch is None else self._watch.pending(self._num_chars)
        if self._watch is None or hit is None or hit.start >= self._num_chars:
            return None
        self.closed_by = hit.policy, hit.rule.version
        first = min(first_token(self._ends, hit.start, self.num_told), len(self._ends) - 1)
        begin = self._ends[first - 1] if first else 0
        shown_until = self._num_released - len(hidden)
        begin = max(begin, shown_until)
        whole = "".join(self._pieces)[: self._num_chars] + ("" if self._is_closed else self._state.flush())
        self._is_closed = True
        rest = self._watch.guard.clean(whole[begin:], self._watch.before(begin))
        return len(self._ends) - first, whole[shown_until:begin] + rest

    def rewind(self, num_tokens: int, num_unsent: int = 0) -> int:
        """Roll back tokens. Returns the number of released characters that are removed.

        The last `num_unsent` released characters were not sent to the client. Unsent characters that are not removed by
        the rollback are held back again.
        """
        if num_tokens == 0:
            return 0
        self._num_chars -= self._state.rewind(num_tokens)
        del self._pieces[-num_tokens:], self._ends[-num_tokens:]
        del self._forced[-num_tokens:], self._is_cut[-num_tokens:]
        self.num_told = min(self.num_told, len(self._ends))
        if self._watch is not None:
            self._watch.rewind(num_tokens)
        if self._repeats is not None:
            self._repeats.rewind(self._num_chars)
            self._renew_stops()
        visible = self._num_released - num_unsent
        self._num_released = min(visible, self._num_chars)
        return visible - self._num_released

    def flush(self) -> str:
        """End the output. Returns the text that was still held back, or an empty string if a stop string ended the
        output."""
        if self._is_closed:
            return ""
        tail = self._state.flush()
        if tail:
            self._pieces.append(tail)
            self._num_chars += len(tail)
        num_held = self._num_chars - self._num_released
        self._num_released = self._num_chars
        return self._tail(num_held) if num_held else ""

    def released_text(self, num_unsent: int = 0) -> str:
        """Return the whole released text except its last `num_unsent` characters."""
        return "".join(self._pieces)[: self._num_released - num_unsent]

    def copy(self) -> OutputText:
        """Return an independent copy, for a fork."""
        watch = None if self._watch is None else self._watch.copy()
        repeats = None if self._repeats is None else self._repeats.copy()
        twin = OutputText(self._state.copy(), self._own_stop, self._include_stop, self._banned, watch, repeats)
        twin._pieces = self._pieces.copy()
        twin.num_told, twin.goes_by_last = self.num_told, self.goes_by_last
        twin._ends, twin._forced, twin._is_cut = self._ends.copy(), self._forced.copy(), self._is_cut.copy()
        twin._num_chars = self._num_chars
        twin._num_released = self._num_released
        return twin

    def _release(self, num_new: int) -> Released:
        held = self._num_chars - self._num_released
        tail = self._tail(max(held, num_new + self._window - 1))
        base = self._num_chars - len(tail)  # position in the text of tail[0]
        match = _find_first(self._stop, tail, len(tail) - num_new)
        end = len(tail)
        if match is not None:
            start, stop = match
            end = start + (len(stop) if self._include_stop and stop in self._own_stop else 0)
        if self._banned and (num_banned := self._num_banned(tail[:end], base, len(tail) - num_new)):
            return Released("", num_banned=num_banned)
        if match is not None:
            return self._cut(tail, base, end, stop if stop in self._own_stop else REPEATED)
        if self._repeats is not None:
            self._note_part(self._repeats, num_new)
        end = len(tail) - self._partial_match(tail)
        start = self._num_released - base
        if end <= start:
            return Released("")
        self._num_released = base + end
        return Released(tail[start:end])

    def _renew_stops(self) -> None:
        """Compute which strings end the text now, and how many characters must be searched for them."""
        parts = () if self._repeats is None else self._repeats.texts
        marks = () if self._repeats is None else self._repeats.marks
        self._stop = (*self._own_stop, *parts)
        self._window = max(map(len, (*self._stop, *self._banned, *marks)), default=0)
        #: Whether text is released at once, because it is not searched for anything.
        self.is_plain = not self._window and not self.may_go

    def _note_part(self, repeats: Repeats, num_new: int) -> None:
        """Store a complete part, so that its repetition ends the output."""
        if repeats.changes(self._tail(num_new + self._window)):
            tail = self._tail(num_new + MAX_CHARS)
            repeats.add(tail, self._num_chars - len(tail), num_new)
            self._renew_stops()

    def _cut(self, tail: str, base: int, end: int, stop: str) -> Released:
        """End the text after the first `end` characters of `tail`."""
        start = self._num_released - base
        self._num_chars = self._num_released = base + end
        self._is_closed = True
        return Released(tail[start:end], stop, max(start - end, 0))

    def _num_banned(self, tail: str, base: int, new_from: int) -> int:
        """Return how many tokens to remove, so that the new text ends with no banned phrase; 0 if it has none. The
        first removed token is a sampled token of the phrase. A phrase that consists only of forced tokens stays."""
        most = 0
        for phrase in self._banned:
            start = tail.find(phrase, max(new_from - len(phrase) + 1, 0))
            if start < 0:
                continue
            # the first token that ends after the phrase's start
            token = max(bisect_right(self._ends, base + start), self.num_told)
            drawn = [at for at in range(token, len(self._ends)) if not self._forced[at]]
            if drawn:
                most = max(most, len(self._ends) - drawn[-1 if self.goes_by_last else 0])
        return most

    def num_since_drawn(self) -> int:
        """Return the number of tokens from the last sampled, unsent token to the end; 0 if there is no such token."""
        drawn = [at for at in range(self.num_told, len(self._ends)) if not self._forced[at]]
        return len(self._ends) - drawn[-1] if drawn else 0

    def _partial_match(self, tail: str) -> int:
        """Return the length of the longest end of `tail` that could begin a stop string or a banned phrase."""
        best = 0
        for stop in (*self._stop, *self._banned):
            for length in range(min(len(stop) - 1, len(tail)), best, -1):
                if tail.endswith(stop[:length]):
                    best = length
                    break
        return best

    def _until(self, end: int) -> str:
        """Return the last characters before position `end`, as many as can belong to a match."""
        num_after = self._num_chars - end
        tail = self._tail(num_after + self._window - 1)
        return tail[: len(tail) - num_after]

    def _tail(self, num_chars: int) -> str:
        """Return the last `num_chars` characters, or the whole text if it is shorter."""
        if num_chars <= 0:
            return ""
        parts: list[str] = []
        missing = num_chars
        for piece in reversed(self._pieces):
            parts.append(piece)
            missing -= len(piece)
            if missing <= 0:
                break
        return "".join(reversed(parts))[-num_chars:]


def _find_first(texts: Sequence[str], tail: str, new_from: int) -> tuple[int, str] | None:
    """Return the start and the text of the first match of `texts` that ends in the new text; None without a match."""
    found: tuple[int, str] | None = None
    for text in texts:
        start = tail.find(text, max(new_from - len(text) + 1, 0))
        if start >= 0 and (found is None or start < found[0]):
            found = (start, text)
    return found
