"""The parts of the validation of a GPU in the order in which they run, with the time limit of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A part, which runs in a process of its own. The process is ended after `seconds`. If `argv` is given, that
    command runs instead of `child`."""

    name: str
    seconds: float
    argv: tuple[str, ...] = ()


#: What is worth most comes first: what is not known by then is not known at all if time runs out.
FIRST = (
    Part("smoke", 60),
    Part("load", 60),
    Part("laws", 150),
    Part("attention", 30),
    Part("8b", 100),
    Part("0.6b", 50),
    Part("lora", 30),
    Part("control", 40),
    Part("serve", 40),
)
#: The second command: peers, the checker of memory accesses, and hardware counters.
DEEP = (Part("peers", 240), Part("sanitizer", 180), Part("counters", 120))
#: Wheels that come along are installed first.
WHEELS_SECONDS = 30.0


def chosen(parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
    """Return the parts with these names, in the order of `parts`; all parts if `names` is empty. Raises `ValueError`
    for an unknown name."""
    unknown = [name for name in names if name not in {part.name for part in parts}]
    if unknown:
        raise ValueError(f"no part is called {unknown[0]!r}; there are {', '.join(part.name for part in parts)}")
    return [part for part in parts if not names or part.name in names]
