"""Constraints: small, validated descriptions of the form of an output, shared by all front ends.

    Regex(r"[0-9]{3}-[0-9]{4}")
    JsonSchema({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
    Concat("The answer is ", Choice(["yes", "no"]), ".")

A constraint is immutable, and can be converted to plain data and back (`to_dict`, `parse`). A constraint that exceeds a
limit raises `InvalidRequest` when it is created. Errors in the constraint's grammar are found when the constraint is
compiled. This module does not handle tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from bridle.errors import InvalidRequest
from bridle.safe_repr import short_repr
from bridle.structured_output import limits
from bridle.structured_output.checks import (
    PARAM,
    check_brackets,
    check_count,
    check_one_of,
    check_text,
    check_total,
    schema_text,
)
from bridle.structured_output.gbnf import is_gbnf

Whitespace = Literal["fixed", "flexible"]
Unit = Literal["word", "char"]


class Constraint:
    """Base class of all constraints. Pass a constraint to `LLM.generate(..., constraint=...)`, or set it as the
    `controller` of an engine request."""

    #: Constrained text is never rolled back, so it can be shown at once.
    max_rewind: ClassVar[int] = 0
    #: For combinations with other controllers: forced tokens are only one spelling of the allowed text, and the
    #: controller can be asked for other spellings.
    is_lenient: ClassVar[bool] = True

    def to_dict(self) -> dict[str, Any]:
        """Return the constraint as JSON-ready data; `parse` reads it back."""
        raise NotImplementedError

    @property
    def key(self) -> str:
        """Return a hash that is equal for equal constraints."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Regex(Constraint):
    """The whole output matches the regex `pattern`, in Rust's syntax, without look-around and back references. `\\d`
    means 0 to 9; `^` and `$` are not needed. An output that matches ends where the model would continue outside the
    pattern. With `longest`, the output continues until the model ends it, or until the pattern allows no more."""

    pattern: str
    longest: bool = False

    def __post_init__(self) -> None:
        check_text(self.pattern, "regex")
        check_brackets(self.pattern, "regex")
        if not isinstance(self.longest, bool):
            raise InvalidRequest(f"longest is {short_repr(self.longest)}; must be true or false", PARAM)

    def to_dict(self) -> dict[str, Any]:
        return {"regex": self.pattern} | ({"longest": True} if self.longest else {})


@dataclass(frozen=True, slots=True)
class JsonSchema(Constraint):
    """The output is JSON that fits `schema`: a mapping, its JSON text, or a pydantic model.

    With `fixed` white space, JSON looks like `{"a": 1, "b": [2, 3]}`, and the grammar forces much of it; with
    `flexible`, the model decides the layout. The values of enums and booleans are scored as a whole if possible, unless
    `scored` is False. `schema` is stored as JSON text.
    """

    schema: Any
    whitespace: Whitespace = "fixed"
    scored: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", schema_text(self.schema))
        check_one_of(self.whitespace, get_args(Whitespace), "whitespace")
        _check_scored(self.scored)
        if self.scored:
            raise InvalidRequest("scored is true; only a choice can be scored. Leave it out, or send false.", PARAM)

    def to_dict(self) -> dict[str, Any]:
        how = {} if self.scored is None else {"scored": self.scored}
        return {"json_schema": json.loads(self.schema), "whitespace": self.whitespace, **how}


@dataclass(frozen=True, slots=True)
class JsonObject(Constraint):
    """The output is any JSON object."""

    whitespace: Whitespace = "fixed"

    def __post_init__(self) -> None:
        check_one_of(self.whitespace, get_args(Whitespace), "whitespace")

    def to_dict(self) -> dict[str, Any]:
        return {"json_object": True, "whitespace": self.whitespace}


@dataclass(frozen=True, slots=True)
class Lark(Constraint):
    """The output is derived from `start` of a grammar in Lark's notation, as llguidance reads it."""

    grammar: str

    def __post_init__(self) -> None:
        check_text(self.grammar, "lark")
        check_brackets(self.grammar, "lark")

    def to_dict(self) -> dict[str, Any]:
        return {"lark": self.grammar}


@dataclass(frozen=True, slots=True)
class TokenLark(Lark):
    """A grammar in Lark's notation that also names special tokens by id, as `<[42]>`. Only bridle itself writes such
    grammars."""


@dataclass(frozen=True, slots=True)
class Yacc(Constraint):
    """The output is derived from a grammar in AICI's yacc-like notation."""

    grammar: str

    def __post_init__(self) -> None:
        check_text(self.grammar, "yacc")
        check_brackets(self.grammar, "yacc")

    def to_dict(self) -> dict[str, Any]:
        return {"yacc": self.grammar}


@dataclass(frozen=True, slots=True)
class Gbnf(Constraint):
    """The output is derived from `root` of a grammar in llama.cpp's notation (GBNF), which SGLang calls EBNF."""

    grammar: str

    def __post_init__(self) -> None:
        check_text(self.grammar, "gbnf")
        check_brackets(self.grammar, "gbnf")

    def to_dict(self) -> dict[str, Any]:
        return {"gbnf": self.grammar}


@dataclass(frozen=True, slots=True)
class Choice(Constraint):
    """The output is one of `options`. By default, options are scored as a whole if possible, and one option is sampled
    by its probability. With `scored` False, each token is sampled under a mask instead. With `scored` True, a request
    whose options cannot be scored is refused; the variable `choice` gets the probabilities of all options."""

    options: tuple[str, ...]
    scored: bool | None = None

    def __init__(self, options: Iterable[str], scored: bool | None = None) -> None:
        if isinstance(options, (str, bytes)) or not isinstance(options, Iterable):
            raise InvalidRequest(f"choice is {short_repr(options)}; must be a list of texts", PARAM)
        _check_scored(scored)
        object.__setattr__(self, "options", tuple(options))
        object.__setattr__(self, "scored", scored)
        check_count(len(self.options), limits.MAX_OPTIONS, "choice", "options")
        check_total(sum(len(option) for option in self.options if isinstance(option, str)), "choice")
        for option in self.options:
            check_text(option, "choice")
        twice = next((text for text, count in Counter(self.options).items() if count > 1), None) if scored else None
        if twice is not None:
            raise InvalidRequest(f"choice: got {short_repr(twice)} twice; scored options must differ", PARAM)

    def to_dict(self) -> dict[str, Any]:
        how = {} if self.scored is None else {"scored": self.scored}
        return {"choice": list(self.options), **how}


@dataclass(frozen=True, slots=True)
class Substring(Constraint):
    """The output is quoted from `text`: a run of its whole words (or of its characters), followed by `end`."""

    text: str
    end: str = ""
    unit: Unit = "word"

    def __post_init__(self) -> None:
        check_text(self.text, "substring")
        check_text(self.end, "end")
        check_one_of(self.unit, get_args(Unit), "unit")
        if not 0 < len(self.text) <= limits.MAX_SUBSTRING_CHARS or not self.text.strip():
            raise InvalidRequest(
                f"substring has {len(self.text)} characters; must have 1 to {limits.MAX_SUBSTRING_CHARS}, "
                "and not only white space",
                PARAM,
            )

    def to_dict(self) -> dict[str, Any]:
        return {"substring": self.text, "end": self.end, "unit": self.unit}


@dataclass(frozen=True, slots=True)
class Concat(Constraint):
    """The output consists of the parts in order; a string is a part with exactly this text."""

    parts: tuple[Constraint, ...]

    def __init__(self, *parts: Constraint | str) -> None:
        object.__setattr__(self, "parts", _parts(parts, "sequence"))

    def to_dict(self) -> dict[str, Any]:
        return {"sequence": [part.to_dict() for part in self.parts]}


@dataclass(frozen=True, slots=True)
class OneOf(Constraint):
    """The output is any one of the parts; a string is a part with exactly this text."""

    parts: tuple[Constraint, ...]

    def __init__(self, *parts: Constraint | str) -> None:
        object.__setattr__(self, "parts", _parts(parts, "any_of"))

    def to_dict(self) -> dict[str, Any]:
        return {"any_of": [part.to_dict() for part in self.parts]}


@dataclass(frozen=True, slots=True)
class After(Constraint):
    """The output is free text up to and including the first `marker`, then a text that fits `constraint`. The marker is
    ordinary text, not a special token."""

    marker: str
    constraint: Constraint

    def __post_init__(self) -> None:
        check_text(self.marker, "after")
        if not self.marker:
            raise InvalidRequest("after is empty; must be the text that ends the free part", PARAM)
        object.__setattr__(self, "constraint", _parts((self.constraint,), "then")[0])

    def to_dict(self) -> dict[str, Any]:
        return {"after": self.marker, "then": self.constraint.to_dict()}


# -- plain data --------------------------------------------------------------------------------------------


def parse(data: object, depth: int = 0) -> Constraint:
    """Read a constraint from plain data such as `{"regex": "a+"}`. Constraint objects and strings are also accepted.
    Raises `InvalidRequest`."""
    if isinstance(data, Constraint):
        return data
    if isinstance(data, str):
        return Choice((data,))
    if not isinstance(data, Mapping):
        raise InvalidRequest(
            f"the constraint is {short_repr(data)}; must be an object such as {{'regex': 'a+'}}", PARAM
        )
    if depth > limits.MAX_NESTING:
        raise InvalidRequest(f"the constraint nests more than {limits.MAX_NESTING} combinations", PARAM)
    kinds = [name for name in _READERS if name in data]
    if len(kinds) != 1:
        found = " and ".join(map(repr, kinds)) or "none"
        raise InvalidRequest(f"the constraint has {found} of {', '.join(_READERS)}; must have exactly one", PARAM)
    options = {name: value for name, value in data.items() if name != kinds[0]}
    known, read = _READERS[kinds[0]]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise InvalidRequest(f"a constraint of kind {kinds[0]!r} has no field {short_repr(unknown[0])}", PARAM)
    return read(data[kinds[0]], options, depth + 1)


def _read_json_object(value: Any, options: dict[str, Any], depth: int) -> Constraint:
    if value is not True:
        raise InvalidRequest(f"json_object is {short_repr(value)}; must be true", PARAM)
    return JsonObject(**options)


def _read_after(value: Any, options: dict[str, Any], depth: int) -> Constraint:
    if "then" not in options:
        raise InvalidRequest("a constraint of kind 'after' needs the field 'then'", PARAM)
    return After(value, parse(options["then"], depth))


def _read_parts(make: Callable[..., Constraint], name: str) -> _Reader:
    def read(value: Any, options: dict[str, Any], depth: int) -> Constraint:
        if not isinstance(value, (list, tuple)):
            raise InvalidRequest(f"{name} is {short_repr(value)}; must be a list", PARAM)
        check_count(len(value), limits.MAX_PARTS, name, "parts")
        return make(*(parse(part, depth) for part in value))

    return read


def _plain(make: Callable[..., Constraint]) -> _Reader:
    return lambda value, options, depth: make(value, **options)


def _grammar(text: Any) -> Constraint:
    """Return the constraint for a grammar in Lark's notation or in GBNF; bridle detects the notation."""
    return Gbnf(text) if isinstance(text, str) and is_gbnf(text) else Lark(text)


_Reader = Callable[[Any, dict[str, Any], int], Constraint]
#: For each kind: its further fields, and the function that makes the constraint.
_READERS: dict[str, tuple[tuple[str, ...], _Reader]] = {
    "regex": (("longest",), _plain(Regex)),
    "json_schema": (("whitespace", "scored"), _plain(JsonSchema)),
    "json_object": (("whitespace",), _read_json_object),
    "lark": ((), _plain(Lark)),
    "yacc": ((), _plain(Yacc)),
    "gbnf": ((), _plain(Gbnf)),
    "grammar": ((), _plain(_grammar)),
    "choice": (("scored",), _plain(Choice)),
    "substring": (("end", "unit"), _plain(Substring)),
    "sequence": ((), _read_parts(Concat, "sequence")),
    "any_of": ((), _read_parts(OneOf, "any_of")),
    "after": (("then",), _read_after),
}


def _check_scored(scored: object) -> None:
    if scored is not None and not isinstance(scored, bool):
        raise InvalidRequest(f"scored is {short_repr(scored)}; must be true or false", PARAM)


# -- combinations ------------------------------------------------------------------------------------------


def _parts(parts: Iterable[Constraint | str], name: str) -> tuple[Constraint, ...]:
    made = tuple(Choice((part,)) if isinstance(part, str) else part for part in parts)
    check_count(len(made), limits.MAX_PARTS, name, "parts")
    for part in made:
        if not isinstance(part, Constraint):
            raise InvalidRequest(f"{name} holds {short_repr(part)}; must hold constraints or texts", PARAM)
    depth = 1 + max(map(_nesting, made))
    if depth > limits.MAX_NESTING:
        raise InvalidRequest(f"{name} nests {depth} combinations; at most {limits.MAX_NESTING}", PARAM)
    check_total(sum(map(_weight, made)), name)
    return made


def _nesting(constraint: Constraint) -> int:
    if isinstance(constraint, After):
        return 1 + _nesting(constraint.constraint)
    return 1 + max(map(_nesting, constraint.parts)) if isinstance(constraint, (Concat, OneOf)) else 0


def _weight(constraint: Constraint) -> int:
    return len(json.dumps(constraint.to_dict()))
