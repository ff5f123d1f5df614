"""Rows of the tables of flags: a flag of another server, and its equivalent in `bridle serve`.

A flag has the same name in bridle, is replaced by one of bridle's flags, or is refused with a reason. A name that ends
with a star stands for all flags with this prefix that have no separate row, and is always refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bridle.compat.schema import System, systems_of

#: Stands for the model, which is not a flag in bridle.
MODEL = "MODEL"
FAMILY = "*"


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of another server. `here` is the flag's equivalent in bridle: a flag, or a flag with its value. If the
    flag has several values, all except the first become values of the flag `further`. Without `here`, the flag is
    refused, and `why` names the alternative. With `here`, `why` says how the values differ. A flag that `is_shown` is
    accepted by every command that has `here`, and appears on help pages."""

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
        """Return whether this table row applies to the flag `name`."""
        return name == self.name or (self.is_family and name.startswith(self.name.removesuffix(FAMILY)))


def same(systems: str, names: str, but: str = "") -> list[Flag]:
    """Return table rows of flags that have the same name and meaning in bridle. `but` says how bridle's values
    differ."""
    return [Flag(systems_of(systems), name, name, but) for name in names.split()]


def taken(systems: str, names: str, here: str, but: str = "", *, further: str = "") -> list[Flag]:
    """Return table rows of flags that `bridle serve` replaces by its own flag `here`."""
    return [Flag(systems_of(systems), name, here, but, further) for name in names.split()]


def spelt(systems: str, names: str, here: str) -> list[Flag]:
    """Return table rows of names that every command accepts in place of its flag `here`."""
    return [Flag(systems_of(systems), name, here, is_shown=True) for name in names.split()]


def refused(systems: str, names: str, why: str) -> list[Flag]:
    """Return table rows of refused flags. `why` names the alternative, or says why no flag is needed."""
    return [Flag(systems_of(systems), name, why=why) for name in names.split()]


def refusals(systems: str, reasons: Mapping[str, str]) -> list[Flag]:
    """Return table rows of refused flags. `reasons` maps a text with several names to the reason for these flags."""
    return [flag for names, why in reasons.items() for flag in refused(systems, names, why)]
