"""Values in messages: short, and cheap whatever they hold.

A client may send a list of a million numbers where a name belongs. The error shows how it begins; writing out the rest
of it would take longer than the request that is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from reprlib import Repr
from typing import Any

MAX_SHOWN_CHARS = 80


class _Short(Repr):
    """`repr`, of the beginnings of things."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = 16
        self.maxlevel = 4
        self.maxlong = self.maxother = MAX_SHOWN_CHARS

    def repr_str(self, x: str, level: int) -> str:
        return repr(x[: MAX_SHOWN_CHARS + 1])

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x[: MAX_SHOWN_CHARS + 1])

    def repr_dict(self, x: Mapping[Any, Any], level: int) -> str:
        """In their own order: the base class sorts all keys first."""
        if level <= 0 and x:
            return "{...}"
        pairs = [f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in islice(x, self.maxdict)]
        return "{" + ", ".join(pairs + ["..."] * (len(x) > self.maxdict)) + "}"


_short = _Short()


def shown(value: object) -> str:
    """A value as its `repr`, cut after some eighty characters."""
    text = _short.repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
