"""Finds the known name that a misspelled name probably means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: The minimum similarity of a misspelled name and the known name. Two names of five letters may differ in one letter.
_ALIKE = 0.85
_MIN_CHARS = 4
_MAX_DIFFERENCE = 3
_MAX_CHARS = 64


def nearest(name: str, known: Iterable[str], alike: float = _ALIKE) -> str | None:
    """Return the known name that `name` probably misspells; None if no known name is similar enough."""
    if not _MIN_CHARS <= len(name) <= _MAX_CHARS:
        return None
    plain = {
        each.replace("-", "_").lower(): each
        for each in known
        if len(each) >= _MIN_CHARS and abs(len(each) - len(name)) <= _MAX_DIFFERENCE
    }
    close = difflib.get_close_matches(name.replace("-", "_").lower(), sorted(plain), n=1, cutoff=alike)
    return plain[close[0]] if close else None


def closest(name: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """Return the known name that is most similar to `name`, or None. Capitals, dashes and a missing owner
    (`owner/name`) are ignored."""
    plain: dict[str, str] = {}
    for each in known:
        plain.setdefault(_plain(each), each)
        plain.setdefault(_plain(each.rpartition("/")[2]), each)
    found = difflib.get_close_matches(_plain(name)[:_MAX_CHARS], sorted(plain), n=1, cutoff=alike)
    return plain[found[0]] if found else None


def _plain(name: str) -> str:
    return name.lower().lstrip("-").replace("_", "-")
