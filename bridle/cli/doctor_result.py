"""One finding of `bridle doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `advice` says what to do about it."""

    level: Level
    subject: str
    text: str
    advice: str = ""


Probe = Callable[[], Iterator[Finding]]
