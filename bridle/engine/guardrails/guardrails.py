"""Guardrails on outputs as plain data, and the search for their matches. Patterns are searched in the text, not in
tokens. Each rule says how the text is normalized first. The search includes the end of the prompt. So a prompt cannot
contain the first half of a match that the output completes. `guardrail_matcher.py` applies guardrails to a growing
output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import regex

from bridle.engine.guardrails.text_normalization import HIDDEN, Reading, read_text, without_unseen
from bridle.errors import BridleError, ControllerError

#: Reaction to a match: sample other tokens, end the output, replace the matched text, or fail the output.
Action = Literal["retry", "end", "replace", "fail"]
OnFailure = Literal["end", "skip"]

#: Maximum length of a match in characters, unless a rule sets another one.
MAX_MATCH = 512
#: Maximum number of seconds of one search; after that the rule has failed.
_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class TextRule:
    """A forbidden pattern, matched against the text after the normalization `reading`. A rule with `is_late` applies
    only when further text can no longer change its match. `check` names an additional test of the matched text, such as
    a check digit."""

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
    """A loop rule: a text of `min_length` to `max_length` characters may not occur `times` times in a row."""

    policy: str
    times: int = 8
    min_length: int = 1
    max_length: int = 200
    min_total: int = 40
    version: str = ""


@dataclass(frozen=True, slots=True)
class BudgetRule:
    """Limits on the length of an output: its characters, and its sampled and forced tokens. Tokens that were rolled
    back count toward the limits too."""

    policy: str
    max_chars: int | None = None
    max_work: int | None = None
    version: str = ""


@dataclass(frozen=True, slots=True)
class Guardrails:
    """All guardrails for the outputs of a request. `allowed` is a mask of the tokens that may be sampled."""

    texts: tuple[TextRule, ...] = ()
    loops: tuple[LoopRule, ...] = ()
    budgets: tuple[BudgetRule, ...] = ()
    allowed: bytes | None = None

    def clean(self, text: str, before: str = "") -> str:
        """Return a text that follows `before`, with all matches of all rules replaced or removed. If a matched rule
        permits neither replacing nor removing the match, the result is empty."""
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
            is_clean = not any(find_match(rule, _whole(rule, whole), 0, len(before))[0] for rule in rules)
        except RuleFailed:
            is_clean = False
        return text if is_clean else ""

    def clean_error(self, error: BridleError) -> BridleError:
        """Return a controller's error. The controller's own text is left out if a rule matches it."""
        said = error.logs if isinstance(error, ControllerError) else ""
        if (self.clean(str(error)), self.clean(said)) == (str(error), said):
            return error
        return ControllerError("a controller failed, and policies forbid what it said of that")

    @property
    def reach(self) -> int:
        """Return the number of characters before an output that a match in the output can include."""
        return max((rule.max_length for rule in self.texts), default=0)

    @property
    def looks_through(self) -> bool:
        """Return True if the rule ignores invisible characters."""
        return any(rule.reading != "written" for rule in self.texts)

    def tail(self, text: str) -> str:
        """Return the part at the end of a text that can be part of a match together with later text."""
        text = without_unseen(text) if self.looks_through else text
        return text[max(len(text) - self.reach, 0) :]


@dataclass(frozen=True, slots=True)
class GuardrailMatch:
    """The match of a rule: the characters from `start` to `end` of the whole text. A match can also mean that the
    output must end."""

    rule: TextRule | LoopRule | BudgetRule
    start: int = 0
    end: int = 0

    @property
    def policy(self) -> str:
        """Return the name of the policy to which the rule belongs."""
        return self.rule.policy

    @property
    def takes_another_way(self) -> bool:
        """Return True if the match is rolled back and other tokens are sampled."""
        return isinstance(self.rule, TextRule) and self.rule.action == "retry"

    @property
    def is_replaced(self) -> bool:
        """Return whether a replacement text takes the place of the match."""
        return isinstance(self.rule, TextRule) and self.rule.action == "replace"


class RuleFailed(Exception):
    """A rule could not be applied, for example because its search took too long."""

    def __init__(self, rule: TextRule) -> None:
        super().__init__(rule.policy)
        self.rule = rule


# -- patterns ----------------------------------------------------------------------------------------------


@lru_cache(512)
def compiled(pattern: str) -> regex.Pattern[str]:
    """Return the compiled pattern. Raises `regex.error`."""
    return regex.compile(pattern, regex.V1)


def _luhn(digits: str) -> bool:
    """Return whether the check digit of a card number is valid."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        number = int(digit) * (1 + place % 2)
        total += number - 9 if number > 9 else number
    return total % 10 == 0


def _card_end(text: str, start: int, end: int) -> int | None:
    """Return the end of a card number that begins at `start`; None if there is none. A card number ends only at the end
    of a group of digits. A card number has 13 to 19 digits and a valid check digit."""
    places = [at for at in range(start, end) if text[at].isdecimal()]
    digits = "".join(str(int(text[at])) for at in places)
    for count in range(min(len(digits), 19), 12, -1):
        after = places[count - 1] + 1
        if not text[after : after + 1].isdecimal() and _luhn(digits[:count]) and digits[:count].strip("0"):
            return after
    return None


#: Functions that check the text found by a pattern. Each returns the real end of the match, or None if there is no
#: match.
CHECKS: Mapping[str, Callable[[str, int, int], int | None]] = {"card": _card_end}


def find_match(rule: TextRule, text: str, pos: int, least_end: int) -> tuple[tuple[int, int] | None, int]:
    """Return the first match from `pos` on that ends after `least_end`. Also return the position where an incomplete
    match may begin. A possible match that is followed by too many invisible characters counts as a match."""
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
    """Search like `find_match`, in a text that ends at `limit`."""
    pattern, check = compiled(rule.pattern), CHECKS.get(rule.check)
    at = pos
    try:
        while (found := pattern.search(text, at, limit, timeout=_TIMEOUT)) is not None:
            start, end = found.span()
            real = end if check is None else check(text, start, end)
            if real is not None and real > least_end:
                return (start, real), start
            if rule.is_late and may_grow(rule, text, start, limit):
                return None, start
            at = start + 1
        partial = pattern.search(text, at, limit, partial=True, timeout=_TIMEOUT)
    except TimeoutError:
        raise RuleFailed(rule) from None
    return None, limit if partial is None else partial.start()


def may_grow(rule: TextRule, text: str, start: int, end: int | None = None) -> bool:
    """Return True if text after `end` could extend a match that begins at `start`."""
    return compiled(rule.pattern).fullmatch(text, start, end, partial=True, timeout=_TIMEOUT) is not None


def _whole(rule: TextRule, text: str) -> str:
    return read_text(text, rule.reading).whole()


def _cleaned(rule: TextRule, before: str, text: str) -> str:
    """Return `text`, which follows `before`, with all matches of one rule replaced or removed."""
    growing = read_text(before + text, rule.reading)
    whole, folded, made, at = before + text, growing.whole(), "", len(before)
    pos = 0
    while (found := find_match(rule, folded, pos, growing.folded(len(before)))[0]) is not None:
        start, end = max(growing.raw(found[0]), at), growing.raw_end(found[1])
        made += whole[at:start] + (rule.replacement if rule.action == "replace" else "")
        at, pos = max(end, at), found[1]
    return made + whole[at:]
