"""One flag of another server, and its counterpart in `bridle serve`.

A flag is the same here, is taken under its own name for another one, or is refused with a reason. A name that ends with
a star means all flags with this beginning and without a row of their own: such a family is always refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bridle.compat.schema import System, systems_of

#: What stands for the model, which has no flag here.
MODEL = "MODEL"
FAMILY = "*"


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of another server. `here` is its counterpart: a flag, or a flag with its value. Values after the first one
    go to the flag `further`. Without `here` it is refused, and `why` names the alternative. Where both are there, `why`
    says how values differ. A flag that is `shown` is accepted by every command that has the flag, and appears on help
    pages."""

    systems: tuple[System, ...]
    name: str
    here: str = ""
    why: str = ""
    further: str = ""
    is_shown: bool = False

    @property
    def is_same(self) -> bool:
        return self.here == self.name

    @property
    def is_family(self) -> bool:
        return self.name.endswith(FAMILY)

    def covers(self, name: str) -> bool:
        """Return whether the row is about this flag."""
        return name == self.name or (self.is_family and name.startswith(self.name.removesuffix(FAMILY)))


def same(systems: str, names: str, but: str = "") -> list[Flag]:
    """Flags that mean the same here; `but` says how their values differ."""
    return [Flag(systems_of(systems), name, name, but) for name in names.split()]


def taken(systems: str, names: str, here: str, but: str = "", *, further: str = "") -> list[Flag]:
    """Flags that `bridle serve` takes under their own names for one of its own."""
    return [Flag(systems_of(systems), name, here, but, further) for name in names.split()]


def spelt(systems: str, names: str, here: str) -> list[Flag]:
    """Further names that a flag has here, on every command."""
    return [Flag(systems_of(systems), name, here, is_shown=True) for name in names.split()]


def refused(systems: str, names: str, why: str) -> list[Flag]:
    """Flags that are not here; `why` names the alternative, or the reason why none is needed."""
    return [Flag(systems_of(systems), name, why=why) for name in names.split()]


def refusals(systems: str, reasons: Mapping[str, str]) -> list[Flag]:
    """Flags that are not here, with the reason of each group of names."""
    return [flag for names, why in reasons.items() for flag in refused(systems, names, why)]
