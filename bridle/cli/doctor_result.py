"""One finding of `bridle doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `advice` is the next step."""

    level: Level
    subject: str
    text: str
    advice: str = ""


Probe = Callable[[], Iterator[Finding]]
