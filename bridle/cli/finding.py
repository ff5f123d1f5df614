"""What `bridle doctor` has to say about one thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `advice` says what to do about it."""

    level: Level
    subject: str
    text: str
    advice: str = ""


Probe = Callable[[], Iterator[Finding]]
