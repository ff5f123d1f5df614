"""What an operator demands of texts, as plain data, and how one growing text is held to it.

Every token of an output passes here, whether it was drawn, forced, or put in place of another, and whatever steers the
output: `OutputText` tells a `Watch` each new piece of text, and the watch says what must go. Text that may still become
a match is not settled, and so not told to the client. Matches are looked for in the text, which has one form whatever
its tokens are, as each rule reads it. The end of the prompt belongs to the text, so that a prompt cannot say the first
half of what is forbidden.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import regex

from bridle.engine.folding import HIDDEN, GrowingText, Reading, read_text, without_unseen
from bridle.errors import BridleError, ControllerError

#: What happens with a match: another way is taken, the output ends, or another text takes its place.
Action = Literal["retry", "end", "replace", "fail"]
OnFailure = Literal["end", "skip"]

#: How many characters of a match are looked at, unless a rule says otherwise.
MAX_MATCH = 512
#: Characters before the place where a match may begin that a pattern can look back at.
_CONTEXT = 64
#: Seconds for one search, after which the rule has failed.
_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class TextRule:
    """A pattern that may not be in a text, read as `reading` says. One that is `is_late` is a match only once no
    further text can make it longer or none. `check` names a test of what was found."""

    policy: str
    pattern: str
    action: Action = "retry"
    replacement: str = ""
    reading: Reading = "written"
    is_late: bool = False
    check: str = ""
    max_length: int = MAX_MATCH
    on_failure: OnFailure = "end"
    version: str = ""


@dataclass(frozen=True, slots=True)
class LoopRule:
    """The same text of `min_length` to `max_length` characters may not follow itself so that it is there `times`."""

    policy: str
    times: int = 8
    min_length: int = 1
    max_length: int = 200
    min_total: int = 40
    version: str = ""


@dataclass(frozen=True, slots=True)
class BudgetRule:
    """The most characters of an output, and the most tokens drawn and forced for it, those included that were taken
    back."""

    policy: str
    max_chars: int | None = None
    max_work: int | None = None
    version: str = ""


@dataclass(frozen=True, slots=True)
class Guard:
    """All that is demanded of the texts of a request. `allowed` is a mask of the tokens that may be drawn at all."""

    texts: tuple[TextRule, ...] = ()
    loops: tuple[LoopRule, ...] = ()
    budgets: tuple[BudgetRule, ...] = ()
    allowed: bytes | None = None

    def clean(self, text: str, before: str = "") -> str:
        """A text that follows `before`, with all that may not be in it replaced or left out; empty if a rule cannot say
        what that is, and may not be left out."""
        rules = list(self.texts)
        for rule in self.texts:
            try:
                text = _cleaned(rule, before, text)
            except RuleFailed:
                if rule.on_failure == "end":
                    return ""
                rules.remove(rule)
        whole = before + text
        try:
            is_clean = not any(_find(rule, _whole(rule, whole), 0, len(before))[0] for rule in rules)
        except RuleFailed:
            is_clean = False
        return text if is_clean else ""

    def clean_error(self, error: BridleError) -> BridleError:
        """The error of a controller, whose words may be its own: without them, if they say what no text may."""
        said = error.logs if isinstance(error, ControllerError) else ""
        if (self.clean(str(error)), self.clean(said)) == (str(error), said):
            return error
        return ControllerError("a controller failed, and policies forbid what it said of that")

    @property
    def reach(self) -> int:
        """How many characters that are seen before a text can be part of a match in it."""
        return max((rule.max_length for rule in self.texts), default=0)

    @property
    def looks_through(self) -> bool:
        """Whether a rule passes over what nobody sees."""
        return any(rule.reading != "written" for rule in self.texts)

    def tail(self, text: str) -> str:
        """The end of a text that can be part of a match in what follows it."""
        text = without_unseen(text) if self.looks_through else text
        return text[max(len(text) - self.reach, 0) :]


@dataclass(frozen=True, slots=True)
class Hit:
    """What a rule found: the characters from `start` to `end` of the whole text, or an output that must end."""

    rule: TextRule | LoopRule | BudgetRule
    start: int = 0
    end: int = 0

    @property
    def policy(self) -> str:
        """Whose rule it is."""
        return self.rule.policy

    @property
    def takes_another_way(self) -> bool:
        """Whether something else is to be drawn."""
        return isinstance(self.rule, TextRule) and self.rule.action == "retry"


class RuleFailed(Exception):
    """A rule could not be applied."""

    def __init__(self, rule: TextRule) -> None:
        super().__init__(rule.policy)
        self.rule = rule


# -- patterns ----------------------------------------------------------------------------------------------


@lru_cache(512)
def compiled(pattern: str) -> regex.Pattern[str]:
    """The pattern, compiled. Raises `regex.error`."""
    return regex.compile(pattern, regex.V1)


def _luhn(digits: str) -> bool:
    """Whether the check digit of a card number is right."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        number = int(digit) * (1 + place % 2)
        total += number - 9 if number > 9 else number
    return total % 10 == 0


def _card_end(text: str, start: int, end: int) -> int | None:
    """Where a card number ends that begins at `start`, if one does: 13 to 19 digits with a right check digit, up to the
    end of a group."""
    places = [at for at in range(start, end) if text[at].isdecimal()]
    digits = "".join(str(int(text[at])) for at in places)
    for count in range(min(len(digits), 19), 12, -1):
        after = places[count - 1] + 1
        if not text[after : after + 1].isdecimal() and _luhn(digits[:count]) and digits[:count].strip("0"):
            return after
    return None


#: Tests of what a pattern found: where the match really ends, or None if it is none.
CHECKS: Mapping[str, Callable[[str, int, int], int | None]] = {"card": _card_end}


def _find(rule: TextRule, text: str, pos: int, least_end: int) -> tuple[tuple[int, int] | None, int]:
    """The first match from `pos` on that ends behind `least_end`, and where one may begin that is not complete. What
    could become one, and is followed by more unseen characters than there may be, is a match."""
    at = pos
    while rule.reading != "written" and (cut := text.find(HIDDEN, at)) >= 0:
        found, start = _find_before(cut, rule, text, at, least_end)
        if found is None and start < cut >= least_end:
            found = start, cut + 1
        if found is not None:
            return found, found[0]
        at = cut + 1
    return _find_before(len(text), rule, text, at, least_end)


def _find_before(limit: int, rule: TextRule, text: str, pos: int, least_end: int) -> tuple[tuple[int, int] | None, int]:
    """The same in a text that is over at `limit`."""
    pattern, check = compiled(rule.pattern), CHECKS.get(rule.check)
    at = pos
    try:
        while (found := pattern.search(text, at, limit, timeout=_TIMEOUT)) is not None:
            start, end = found.span()
            real = end if check is None else check(text, start, end)
            if real is not None and real > least_end:
                return (start, real), start
            if rule.is_late and _may_grow(rule, text, start, limit):
                return None, start
            at = start + 1
        partial = pattern.search(text, at, limit, partial=True, timeout=_TIMEOUT)
    except TimeoutError:
        raise RuleFailed(rule) from None
    return None, limit if partial is None else partial.start()


def _may_grow(rule: TextRule, text: str, start: int, end: int | None = None) -> bool:
    """Whether further text behind `end` could make a longer match of what begins at `start`."""
    return compiled(rule.pattern).fullmatch(text, start, end, partial=True, timeout=_TIMEOUT) is not None


def _whole(rule: TextRule, text: str) -> str:
    return read_text(text, rule.reading).whole()


def _cleaned(rule: TextRule, before: str, text: str) -> str:
    """`text`, which follows `before`, with the matches of one rule replaced or left out."""
    growing = read_text(before + text, rule.reading)
    whole, folded, made, at = before + text, growing.whole(), "", len(before)
    pos = 0
    while (found := _find(rule, folded, pos, growing.folded(len(before)))[0]) is not None:
        start, end = max(growing.raw(found[0]), at), growing.raw_end(found[1])
        made += whole[at:start] + (rule.replacement if rule.action == "replace" else "")
        at, pos = max(end, at), found[1]
    return made + whole[at:]


# -- one growing text --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Scan:
    """How far one rule has looked: before each of `anchors`, one after each token, no match can begin any more."""

    rule: TextRule
    anchors: list[int] = field(default_factory=list)
    is_off: bool = False

    def look(self, text: GrowingText, least_end: int) -> tuple[int, int] | None:
        """Look at the text with one more token; returns a match. Places are those of `text`."""
        rule, anchor = self.rule, self.anchors[-1]
        base = max(anchor - _CONTEXT, 0)
        tail = text.tail(base)
        size = len(tail)
        try:
            found, start = _find(rule, tail, anchor - base, max(least_end - base, anchor - base))
            if found is not None and rule.is_late and size - start < rule.max_length:
                start = next((at for at in range(anchor - base, start) if _may_grow(rule, tail, at)), start)
                is_open = found[1] == size and tail[-1] != HIDDEN
                if is_open or start < found[0] or _may_grow(rule, tail, start):
                    found = None
        except (RuleFailed, TimeoutError):
            if rule.on_failure == "end":
                raise RuleFailed(rule) from None
            self.is_off, found, start = True, None, size
        self.anchors.append(base + (max(start, size - rule.max_length) if found is None else found[0]))
        return None if found is None else (base + found[0], base + found[1])

    def copy(self) -> _Scan:
        return _Scan(self.rule, self.anchors.copy(), self.is_off)


class Watch:
    """Holds one growing text, which follows `lead`, to the rules of a guard. Places in texts count from the end of the
    lead."""

    def __init__(self, guard: Guard, lead: str) -> None:
        self.guard = guard
        self._lead = len(lead)
        self._raw = GrowingText(lead)
        self._texts: dict[Reading, GrowingText] = {"written": self._raw}
        for rule in guard.texts:
            if rule.reading not in self._texts:
                self._texts[rule.reading] = read_text(lead, rule.reading)
        self._scans = [_Scan(rule, [self._first_anchor(rule)]) for rule in guard.texts]
        self._twins = _twins(guard.texts)
        self._longest = max((rule.max_length * rule.times for rule in guard.loops), default=0)

    def _text_of(self, rule: TextRule) -> GrowingText:
        return self._texts[rule.reading]

    def _first_anchor(self, rule: TextRule) -> int:
        """Where in the lead a match may begin that ends behind it."""
        whole = self._text_of(rule).whole()
        first = max(len(whole) - rule.max_length, 0)
        try:
            return next((at for at in range(first, len(whole)) if _may_grow(rule, whole, at)), len(whole))
        except TimeoutError:
            return len(whole)

    def push(self, piece: str) -> Hit | None:
        """Add the text of one more token; returns what must go because of it, the match that begins first."""
        for text in self._texts.values():
            text.push(piece)
        hits = [hit for number in range(len(self._scans)) if (hit := self._look(number)) is not None]
        if hits:
            return min(hits, key=lambda hit: hit.start)
        return self._limit() if piece else None

    def _look(self, number: int) -> Hit | None:
        scan, twin = self._scans[number], self._twins.get(number)
        text = self._text_of(scan.rule)
        if twin is not None and self._texts["seen"].is_as_written:  # then both find the same
            scan.anchors.append(self._scans[twin].anchors[-1])
            return None
        if scan.is_off:
            scan.anchors.append(text.num_chars)
            return None
        found = scan.look(text, text.num_lead)
        if found is None:
            return None
        return Hit(scan.rule, text.raw(found[0]) - self._lead, text.raw_end(found[1]) - self._lead)

    def _limit(self) -> Hit | None:
        """Whether the text is too long, or repeats itself."""
        num_chars = self._raw.num_chars - self._lead
        for budget in self.guard.budgets:
            if budget.max_chars is not None and num_chars >= budget.max_chars:
                return Hit(budget)
        if not self.guard.loops:
            return None
        tail = self._raw.tail(max(self._raw.num_chars - min(self._longest, num_chars), 0))
        return next((Hit(rule) for rule in self.guard.loops if _loops(rule, tail)), None)

    def rewind(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        for text in self._texts.values():
            text.rewind(num_tokens)
        for scan in self._scans:
            del scan.anchors[-num_tokens:]

    def num_settled(self, most: int, least: int) -> int:
        """How many of the first `most` tokens, `least` of which are told, are in no match that may still come."""
        return next((count for count in range(most, least, -1) if self._is_settled(count)), min(most, least))

    def _is_settled(self, count: int) -> bool:
        """Whether a match can begin only behind the first `count` tokens, now and if the others went."""
        for scan in self._scans:
            end = self._text_of(scan.rule).end_of(count)
            if scan.anchors[-1] < end or scan.anchors[count] < end:
                return False
        return True

    def pending(self, num_chars: int) -> Hit | None:
        """The first match if the text ends after `num_chars` characters; None if there is none."""
        hits = [hit for scan in self._scans if not scan.is_off and (hit := self._pending(scan, num_chars)) is not None]
        return min(hits, key=lambda hit: hit.start, default=None)

    def _pending(self, scan: _Scan, num_chars: int) -> Hit | None:
        text, anchor = self._text_of(scan.rule), scan.anchors[-1]
        end = text.num_chars
        if self._lead + num_chars < self._raw.num_chars:  # what a stop string took may have kept a match from being one
            end = text.folded(self._lead + num_chars)
            anchor = min(anchor, max(end - scan.rule.max_length, 0))
        base = max(anchor - _CONTEXT, 0)
        found, _ = _find(scan.rule, text.tail(base)[: end - base], anchor - base, max(text.num_lead - base, 0))
        return None if found is None else Hit(scan.rule, text.raw(base + found[0]) - self._lead)

    def slice(self, start: int, end: int) -> str:
        """The text from `start` to `end`."""
        tail = self._raw.tail(self._lead + start)
        return tail[: max(end - start, 0)]

    def before(self, start: int) -> str:
        """The characters before `start` that can be part of a match behind it."""
        begin = max(self._lead + start - self.guard.reach, 0)
        return self._raw.tail(begin)[: self._lead + start - begin]

    def copy(self) -> Watch:
        """An independent copy."""
        twin = Watch.__new__(Watch)
        twin.guard, twin._lead, twin._longest, twin._twins = self.guard, self._lead, self._longest, self._twins
        twin._texts = {reading: text.copy() for reading, text in self._texts.items()}
        twin._raw = twin._texts["written"]
        twin._scans = [scan.copy() for scan in self._scans]
        return twin


def _twins(rules: Sequence[TextRule]) -> dict[int, int]:
    """Of the rules that read a text as it is written those that others before them are, as it is seen."""
    seen = {rule: number for number, rule in enumerate(rules) if rule.reading == "seen"}
    pairs = ((number, seen.get(replace(rule, reading="seen"), number)) for number, rule in enumerate(rules))
    return {number: twin for number, twin in pairs if twin < number}


def _loops(rule: LoopRule, tail: str) -> bool:
    """Whether the text ends in the same characters so many times."""
    if not tail:
        return False
    for size in _periods(rule, tail):
        times = max(rule.times, -(-rule.min_total // size))
        if len(tail) >= size * times and tail.endswith(tail[-size:] * times):
            return True
    return False


def _periods(rule: LoopRule, tail: str) -> Iterator[int]:
    """The lengths after which the text could repeat itself: those after which its last character does."""
    last = tail[-1]
    for size in range(rule.min_length, min(rule.max_length, len(tail) // 2) + 1):
        if tail[-1 - size] == last:
            yield size


def first_token(ends: Sequence[int], start: int, num_told: int) -> int:
    """The first of the tokens, which end at `ends`, that goes with a match at `start`; those that were told stay."""
    return max(bisect_right(ends, start), num_told)
