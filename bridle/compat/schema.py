"""Rows of the compatibility tables: a name in another system, and its equivalent in bridle.

A field has the same name in bridle, or another name, or is absent with a reason. An absent field that would change the
output is refused. An absent field that cannot change the output is ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

System = Literal[
    "OpenAI",
    "Anthropic",
    "vLLM",
    "SGLang",
    "llama.cpp",
    "TGI",
    "text-generation-webui",
    "AICI",
    "LMQL",
    "Pie",
    "guidance",
    "outlines",
    "Ray",
]
#: Values that switch off a field in all systems.
_OFF: tuple[Any, ...] = (None, False, "", [], {})


@dataclass(frozen=True, slots=True)
class CompatField:
    """A request field, or a keyword argument of Python calls. `here` is bridle's name, and `convert` converts the other
    system's value to bridle's value. Without `here`, the field is absent, and `why` names the alternative. With `here`,
    `why` says which routes have the field, if not all do. `off` are values that have no effect, in addition to None,
    False and empty values. `is_neutral` means that the field cannot change the output. `example` is a value that has an
    effect."""

    systems: tuple[System, ...]
    name: str
    here: str = ""
    why: str = ""
    example: Any = None
    off: tuple[Any, ...] = ()
    is_neutral: bool = False
    convert: Callable[[Any], Any] | None = None

    def is_off(self, value: Any) -> bool:
        """Return whether a value of this field has no effect. The value `example` has an effect, even if it is false or
        empty."""
        return value in self.off or (value in _OFF and (value is None or value != self.example))

    def value_here(self, value: Any) -> Any:
        """Convert the other system's value of this field to bridle's value."""
        return value if self.convert is None or value is None else self.convert(value)


@dataclass(frozen=True, slots=True)
class LibrarySymbol:
    """A function, a class or a setting of a library. A symbol's equivalents may be `keywords` of `LLM`'s calls,
    `members` of `LLM`, `settings` on Ray, `exports` of the package, or `flags` of the server. If all of these fields
    are empty, bridle has no equivalent."""

    system: System
    name: str
    keywords: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    why: str = ""

    @property
    def equivalents(self) -> list[str]:
        """Return the symbol's equivalents in bridle, as code."""
        here = [f"`{name}=`" for name in self.keywords] + [f"`LLM.{name}`" for name in self.members]
        here += [f"`bridle.{name}`" for name in self.exports]
        return here + [f"`{name}`" for name in (*self.settings, *self.flags)]

    @property
    def told(self) -> str:
        """Return the symbol's equivalents in bridle, as text."""
        here = ", ".join(self.equivalents)
        if not here:
            return f"bridle has no such name: {self.why}"
        return here + (f"; {self.why}" if self.why else "")

    @property
    def advice(self) -> str:
        """Return advice for a user who wrote the other system's name."""
        return f"here it is {self.told}" if self.equivalents else self.why


def same(systems: str, names: str, **examples: Any) -> list[CompatField]:
    """Return table rows of fields that have the same name in bridle. `names` is a text with all names, separated by
    spaces."""
    return [CompatField(systems_of(systems), name, name, example=examples.get(name)) for name in names.split()]


def optional(systems: str, name: str, example: Any, off: tuple[Any, ...], where: str = "") -> CompatField:
    """Return the table row of a field that only some of bridle's routes have, under the same name. Routes without the
    field accept only values without effect. `where` names the routes that have the field."""
    return CompatField(systems_of(systems), name, name, where, example=example, off=off)


def named(
    systems: str,
    name: str,
    here: str,
    example: Any,
    convert: Callable[[Any], Any] | None = None,
    off: tuple[Any, ...] = (),
) -> CompatField:
    """Return the table row of a field that has another name in bridle. Routes without the field accept only values
    without effect."""
    return CompatField(systems_of(systems), name, here, example=example, off=off, convert=convert)


def absent(systems: str, name: str, why: str, example: Any = True, off: tuple[Any, ...] = ()) -> CompatField:
    """Return the table row of a field that bridle refuses, because it would change the output."""
    return CompatField(systems_of(systems), name, why=why, example=example, off=off)


def neutral(systems: str, name: str, why: str, example: Any = True) -> CompatField:
    """Return the table row of a field that bridle ignores, because it cannot change the output."""
    return CompatField(systems_of(systems), name, why=why, example=example, is_neutral=True)


def systems_of(words: str) -> tuple[System, ...]:
    """Return the systems in a text of names separated by spaces."""
    return tuple(cast(System, word) for word in words.split())
