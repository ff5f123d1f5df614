"""Evaluates the patterns and values of a client's schema, with a limit on the work.

The checks of a schema multiply with its parts, so all checks of one document share a `WorkBudget`. A backtracking
matcher can take years for a short regex. So only safe patterns are evaluated, which have few repetitions, and no
repetition around alternatives or another repetition.
"""

from __future__ import annotations

import re

#: Approximate maximum number of schemas and values that are checked for one document: some tenths of a second.
MAX_WORK = 200_000
_PATTERN_WORK = 100
_MAX_TEXT = 256
#: A part of a pattern that matches one character: an escape, or a class.
_ATOM = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_REPEAT = re.compile(r"[*+?{]")


class WorkBudget:
    """The remaining work budget for one document."""

    def __init__(self, most: int = MAX_WORK) -> None:
        self._left = most

    def spend(self, amount: int = 1) -> bool:
        """Count some work. Returns whether the work is within the budget."""
        self._left -= amount
        return self._left >= 0

    def matches(self, pattern: object, text: str) -> bool | None:
        """Return whether the pattern occurs in the text; None if a safe evaluation is not possible."""
        if not isinstance(pattern, str) or len(text) > _MAX_TEXT or not self.spend(_PATTERN_WORK + len(pattern)):
            return None
        if not is_quick(pattern):
            return None
        try:
            return re.search(pattern, text) is not None
        except (re.error, OverflowError, RecursionError):
            return None


def is_quick(pattern: str) -> bool:
    """Return whether a backtracking matcher clearly takes at most quadratic time for the pattern."""
    plain = _ATOM.sub("x", pattern).replace("(?:", "(")
    if "(?" in plain:
        return False
    num_repeats = len(_REPEAT.findall(plain))
    if "|" in plain:
        return num_repeats == 0
    return num_repeats <= (1 if "(" in plain else 2)
