"""Matches guardrails against one growing output.

Every token of an output passes through a matcher. It does not matter who steers the output, or how a token was chosen:
sampled, forced, or put in as a replacement. `OutputText` passes each new piece of text to a `GuardrailMatcher`, which
returns the text to remove. Text that can still become part of a match is held back from the client.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from bridle.engine.guardrails.guardrails import (
    GuardrailMatch,
    Guardrails,
    LoopRule,
    RuleFailed,
    TextRule,
    find_match,
    may_grow,
)
from bridle.engine.guardrails.text_normalization import HIDDEN, NormalizedStream, Reading, read_text

#: Number of characters before the earliest position of a match that a pattern's lookbehind can see.
_CONTEXT = 64


@dataclass(slots=True)
class _Scan:
    """Search state of one rule. `anchors` has a position for each token: a match that is still possible after the token
    begins there or later."""

    rule: TextRule
    anchors: list[int] = field(default_factory=list)
    is_off: bool = False

    def look(self, text: NormalizedStream, least_end: int) -> tuple[int, int] | None:
        """Search the text after one more token was added. Returns a match, with positions in `text`."""
        rule, anchor = self.rule, self.anchors[-1]
        base = max(anchor - _CONTEXT, 0)
        tail = text.tail(base)
        size = len(tail)
        try:
            found, start = find_match(rule, tail, anchor - base, max(least_end - base, anchor - base))
            if found is not None and rule.is_late and size - start < rule.max_length:
                start = next((at for at in range(anchor - base, start) if may_grow(rule, tail, at)), start)
                is_open = found[1] == size and tail[-1] != HIDDEN
                if is_open or start < found[0] or may_grow(rule, tail, start):
                    found = None
        except (RuleFailed, TimeoutError):
            if rule.on_failure == "end":
                raise RuleFailed(rule) from None
            self.is_off, found, start = True, None, size
        self.anchors.append(base + (max(start, size - rule.max_length) if found is None else found[0]))
        return None if found is None else (base + found[0], base + found[1])

    def copy(self) -> _Scan:
        return _Scan(self.rule, self.anchors.copy(), self.is_off)


class GuardrailMatcher:
    """Matches one growing text, which follows the text `lead`, against the rules of the guardrails. Positions count
    from the end of `lead`."""

    def __init__(self, guard: Guardrails, lead: str) -> None:
        self.guard = guard
        self._lead = len(lead)
        self._raw = NormalizedStream(lead)
        self._texts: dict[Reading, NormalizedStream] = {"written": self._raw}
        for rule in guard.texts:
            if rule.reading not in self._texts:
                self._texts[rule.reading] = read_text(lead, rule.reading)
        self._scans = [_Scan(rule, [self._first_anchor(rule)]) for rule in guard.texts]
        self._twins = _twins(guard.texts)
        self._longest = max((rule.max_length * rule.times for rule in guard.loops), default=0)

    def _text_of(self, rule: TextRule) -> NormalizedStream:
        return self._texts[rule.reading]

    def _first_anchor(self, rule: TextRule) -> int:
        """Return the first position in `lead` where a match can begin whose end is after `lead`."""
        whole = self._text_of(rule).whole()
        first = max(len(whole) - rule.max_length, 0)
        try:
            return next((at for at in range(first, len(whole)) if may_grow(rule, whole, at)), len(whole))
        except TimeoutError:
            return len(whole)

    def push(self, piece: str) -> GuardrailMatch | None:
        """Add the text of one more token. Returns the match that begins first and must be removed, or None."""
        for text in self._texts.values():
            text.push(piece)
        hits = [hit for number in range(len(self._scans)) if (hit := self._look(number)) is not None]
        if hits:
            return min(hits, key=lambda hit: hit.start)
        return self._limit() if piece else None

    def _look(self, number: int) -> GuardrailMatch | None:
        scan, twin = self._scans[number], self._twins.get(number)
        text = self._text_of(scan.rule)
        if twin is not None and self._texts["seen"].is_as_written:  # then both rules find the same match
            scan.anchors.append(self._scans[twin].anchors[-1])
            return None
        if scan.is_off:
            scan.anchors.append(text.num_chars)
            return None
        found = scan.look(text, text.num_lead)
        if found is None:
            return None
        return GuardrailMatch(scan.rule, text.raw(found[0]) - self._lead, text.raw_end(found[1]) - self._lead)

    def _limit(self) -> GuardrailMatch | None:
        """Return a match if the output is too long or repeats itself, else None."""
        num_chars = self._raw.num_chars - self._lead
        for budget in self.guard.budgets:
            if budget.max_chars is not None and num_chars >= budget.max_chars:
                return GuardrailMatch(budget)
        if not self.guard.loops:
            return None
        tail = self._raw.tail(max(self._raw.num_chars - min(self._longest, num_chars), 0))
        return next((GuardrailMatch(rule) for rule in self.guard.loops if _loops(rule, tail)), None)

    def rewind(self, num_tokens: int) -> None:
        """Roll back the last `num_tokens` tokens."""
        for text in self._texts.values():
            text.rewind(num_tokens)
        for scan in self._scans:
            del scan.anchors[-num_tokens:]

    def num_settled(self, most: int, least: int) -> int:
        """Return how many of the first `most` tokens can no longer be part of a match. The first `least` tokens were
        already sent to the client."""
        return next((count for count in range(most, least, -1) if self._is_settled(count)), min(most, least))

    def _is_settled(self, count: int) -> bool:
        """Return whether every later match begins after the first `count` tokens, even if the tokens after them are
        removed."""
        for scan in self._scans:
            end = self._text_of(scan.rule).end_of(count)
            if scan.anchors[-1] < end or scan.anchors[count] < end:
                return False
        return True

    def pending(self, num_chars: int) -> GuardrailMatch | None:
        """Return the first match of a text that ends after `num_chars` characters; None if there is no match."""
        hits = [hit for scan in self._scans if not scan.is_off and (hit := self._pending(scan, num_chars)) is not None]
        return min(hits, key=lambda hit: hit.start, default=None)

    def _pending(self, scan: _Scan, num_chars: int) -> GuardrailMatch | None:
        text, anchor = self._text_of(scan.rule), scan.anchors[-1]
        end = text.num_chars
        if self._lead + num_chars < self._raw.num_chars:  # text removed by a stop string may have prevented a match
            end = text.folded(self._lead + num_chars)
            anchor = min(anchor, max(end - scan.rule.max_length, 0))
        base = max(anchor - _CONTEXT, 0)
        found, _ = find_match(scan.rule, text.tail(base)[: end - base], anchor - base, max(text.num_lead - base, 0))
        return None if found is None else GuardrailMatch(scan.rule, text.raw(base + found[0]) - self._lead)

    def slice(self, start: int, end: int) -> str:
        """Return the text from `start` to `end`."""
        tail = self._raw.tail(self._lead + start)
        return tail[: max(end - start, 0)]

    def before(self, start: int) -> str:
        """Return the text before `start` that may belong to a match which ends after `start`."""
        begin = max(self._lead + start - self.guard.reach, 0)
        return self._raw.tail(begin)[: self._lead + start - begin]

    def copy(self) -> GuardrailMatcher:
        """Return an independent copy."""
        twin = GuardrailMatcher.__new__(GuardrailMatcher)
        twin.guard, twin._lead, twin._longest, twin._twins = self.guard, self._lead, self._longest, self._twins
        twin._texts = {reading: text.copy() for reading, text in self._texts.items()}
        twin._raw = twin._texts["written"]
        twin._scans = [scan.copy() for scan in self._scans]
        return twin


def _twins(rules: Sequence[TextRule]) -> dict[int, int]:
    """Map each rule for text normalized as `folded` to the same rule for text normalized as `seen`, if there is one.
    Each rule is given by its number."""
    seen = {rule: number for number, rule in enumerate(rules) if rule.reading == "seen"}
    pairs = ((number, seen.get(replace(rule, reading="seen"), number)) for number, rule in enumerate(rules))
    return {number: twin for number, twin in pairs if twin < number}


def _loops(rule: LoopRule, tail: str) -> bool:
    """Return whether the text ends in a repetition that the rule forbids."""
    if not tail:
        return False
    for size in _periods(rule, tail):
        times = max(rule.times, -(-rule.min_total // size))
        if len(tail) >= size * times and tail.endswith(tail[-size:] * times):
            return True
    return False


def _periods(rule: LoopRule, tail: str) -> Iterator[int]:
    """Yield the possible lengths of a repeated text: the distances to earlier occurrences of the last character."""
    last = tail[-1]
    for size in range(rule.min_length, min(rule.max_length, len(tail) // 2) + 1):
        if tail[-1 - size] == last:
            yield size


def first_token(ends: Sequence[int], start: int, num_told: int) -> int:
    """Return the index of the first token to remove for a match at `start`. `ends` are the positions at which the
    tokens end. The first `num_told` tokens of the match stay, because the client already has them."""
    return max(bisect_right(ends, start), num_told)
