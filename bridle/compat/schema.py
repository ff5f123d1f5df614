"""One entry of the tables: a name of another system, and its counterpart here.

A name is the same here, has another name here, or is absent with a reason. An absent field that would change a text is
refused wherever it is sent. A field that cannot change a text may be sent.
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
#: Values that switch a field off, in all systems.
_OFF: tuple[Any, ...] = (None, False, "", [], {})


@dataclass(frozen=True, slots=True)
class CompatField:
    """A field of requests, or a keyword of calls. `here` is its name here, and `convert` converts the other system's
    value to the value here. Without `here` it is absent, and `why` names the alternative; with it, `why` says which
    routes have it, if not all do. `off` are further values of it that ask for nothing. A field that `is_neutral` cannot
    change a text. `example` is a value that asks for something."""

    systems: tuple[System, ...]
    name: str
    here: str = ""
    why: str = ""
    example: Any = None
    off: tuple[Any, ...] = ()
    is_neutral: bool = False
    convert: Callable[[Any], Any] | None = None

    def is_off(self, value: Any) -> bool:
        """Return whether a value asks for nothing. That of the example asks for something, even if it is false or
        empty."""
        return value in self.off or (value in _OFF and (value is None or value != self.example))

    def value_here(self, value: Any) -> Any:
        """The value that it has here."""
        return value if self.convert is None or value is None else self.convert(value)


@dataclass(frozen=True, slots=True)
class LibrarySymbol:
    """A function, a class or a setting of a library. Its counterparts are `keywords` of `LLM`'s calls and `members` of
    it, `settings` on Ray, `exports` of the package and `flags` of the server; without any it is absent."""

    system: System
    name: str
    keywords: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    why: str = ""

    @property
    def told(self) -> str:
        """Return the equivalent here, in words."""
        here = [f"`{name}=`" for name in self.keywords] + [f"`LLM.{name}`" for name in self.members]
        here += [f"`bridle.{name}`" for name in self.exports]
        here += [f"`{name}`" for name in (*self.settings, *self.flags)]
        if not here:
            return f"absent: {self.why}"
        return ", ".join(here) + (f"; {self.why}" if self.why else "")

    @property
    def advice(self) -> str:
        """Return advice for a user that wrote the other system's name."""
        return self.why if self.told == f"absent: {self.why}" else f"here it is {self.told}"


def same(systems: str, names: str, **examples: Any) -> list[CompatField]:
    """Fields that have the same name here; the names are words of one text."""
    return [CompatField(systems_of(systems), name, name, example=examples.get(name)) for name in names.split()]


def optional(systems: str, name: str, example: Any, off: tuple[Any, ...], where: str = "") -> CompatField:
    """A field that has the same name on some routes here, and may be sent to others with the values that switch it
    off; `where` says which have it."""
    return CompatField(systems_of(systems), name, name, where, example=example, off=off)


def named(
    systems: str,
    name: str,
    here: str,
    example: Any,
    convert: Callable[[Any], Any] | None = None,
    off: tuple[Any, ...] = (),
) -> CompatField:
    """A field that has another name here; routes without it take the values that switch it off."""
    return CompatField(systems_of(systems), name, here, example=example, off=off, convert=convert)


def absent(systems: str, name: str, why: str, example: Any = True, off: tuple[Any, ...] = ()) -> CompatField:
    """A field that would change the text, and is not there."""
    return CompatField(systems_of(systems), name, why=why, example=example, off=off)


def neutral(systems: str, name: str, why: str, example: Any = True) -> CompatField:
    """A field that is not there, and cannot change the text."""
    return CompatField(systems_of(systems), name, why=why, example=example, is_neutral=True)


def systems_of(words: str) -> tuple[System, ...]:
    """The systems that a text names, as words."""
    return tuple(cast(System, word) for word in words.split())
