"""Computes the complement of a JSON schema: another schema, for which exactly the values are valid that are invalid for
the first.

A complement is needed for `not`, `if` and overlapping `oneOf`, which llguidance does not support. Not every schema has
a complement that can be written without `not`; for example, a schema with a regex raises `NoEquivalent`. A keyword
restricts only values of one type, so the complement names this type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from bridle.errors import BridleError

Schema = Any  # an object, or a boolean

_TYPES = ("object", "array", "string", "number", "boolean", "null")
_MAX_CHARS = 100
#: Keywords that do not affect which values are valid.
ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"),
        *("$id", "id", "$defs", "definitions", "$anchor", "x-guidance", "contentEncoding", "contentMediaType"),
    }
)


class NoEquivalent(BridleError):
    """Raised if no equivalent of a schema was found in the keywords that llguidance supports."""


def complement(schema: Schema) -> Schema:
    """Return the complement of a schema. Raises `NoEquivalent`."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, Mapping):
        raise NoEquivalent("a schema must be an object or a boolean")
    parts: list[Schema] = []
    for name, value in schema.items():
        if name in ANNOTATIONS:
            continue
        if name not in _COMPLEMENTS:
            raise NoEquivalent(f"keyword {name} has no complement")
        parts.append(_COMPLEMENTS[name](value))
    return any_of(parts)


def any_of(parts: Iterable[Schema]) -> Schema:
    """Return a schema that allows the values that any of `parts` allows."""
    found = [part for part in parts if part is not False]
    if any(part is True or part == {} for part in found):
        return True
    if not found:
        return False
    return found[0] if len(found) == 1 else {"anyOf": found}


def all_of(parts: Iterable[Schema]) -> Schema:
    """Return a schema that allows only the values that all of `parts` allow."""
    found = [part for part in parts if part is not True and part != {}]
    if any(part is False for part in found):
        return False
    if not found:
        return True
    return found[0] if len(found) == 1 else {"allOf": found}


def absent(names: Sequence[str]) -> Schema:
    """Return a schema that allows no object with one of these properties."""
    return {"properties": dict.fromkeys(names, False)}


# -- keyword by keyword --------------------------------------------------------------------------------------


def _type(value: Any) -> Schema:
    names = {value} if isinstance(value, str) else set(value)
    if not names <= {*_TYPES, "integer"}:
        raise NoEquivalent(f"the schema has the unknown type {value}")
    if "integer" in names and "number" not in names:
        raise NoEquivalent("the type integer has no complement")
    rest = [name for name in _TYPES if name not in names]
    return {"type": rest} if rest else False


def _only(kind: str, **keywords: Any) -> Schema:
    return {"type": kind, **keywords}


def _at_least(kind: str, name: str) -> Callable[[int], Schema]:
    """Return the complement of the keyword `minX: n`, which is a maximum of n - 1."""
    return lambda number: _only(kind, **{name: int(number) - 1}) if number > 0 else False


def _at_most(kind: str, name: str) -> Callable[[int], Schema]:
    return lambda number: _only(kind, **{name: int(number) + 1})


def _minimum(name: str) -> Callable[[Any], Schema]:
    def beyond(value: Any) -> Schema:
        if isinstance(value, bool):
            raise NoEquivalent("a boolean exclusive bound (before draft 6) is not supported")
        return _only("number", **{name: value})

    return beyond


def _required(names: Sequence[str]) -> Schema:
    return any_of(_only("object", **absent([name])) for name in names)


def _properties(properties: Mapping[str, Schema]) -> Schema:
    parts: list[Schema] = []
    for name, schema in properties.items():
        wrong = complement(schema)
        if wrong is not False:
            parts.append(_only("object", properties={name: wrong}, required=[name]))
    return any_of(parts)


def _const(value: Any) -> Schema:
    return _enum([value])


def _enum(values: Sequence[Any]) -> Schema:
    """Return schemas that allow the values of unlisted types, and the values of listed types that are not listed."""
    if any(isinstance(value, (list, Mapping)) for value in values):
        raise NoEquivalent("enum or const with an object or a list has no complement")
    texts = [value for value in values if isinstance(value, str)]
    if any(len(text) > _MAX_CHARS for text in texts):
        raise NoEquivalent(f"a text has more than {_MAX_CHARS} characters")
    numbers = sorted({value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)})
    flags = {value for value in values if isinstance(value, bool)}
    parts: list[Schema] = [_only("object"), _only("array")]
    parts.append(_only("string", pattern=f"^{other_than(texts)}$") if texts else _only("string"))
    parts += _between(numbers)
    parts += [{"enum": [flag]} for flag in (False, True) if flag not in flags]
    if None not in values:
        parts.append(_only("null"))
    return any_of(parts)


def _between(numbers: Sequence[float]) -> list[Schema]:
    if not numbers:
        return [_only("number")]
    gaps = [_only("number", exclusiveMinimum=low, exclusiveMaximum=high) for low, high in pairwise(numbers)]
    return [_only("number", exclusiveMaximum=numbers[0]), *gaps, _only("number", exclusiveMinimum=numbers[-1])]


def other_than(texts: Iterable[str]) -> str:
    """Return a regex, to be anchored, that matches every text except `texts`."""
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _other_than(trie) if trie else r"[\s\S]*"


def _other_than(node: Mapping[str, Any]) -> str:
    """Return a regex of the texts that leave the trie of excluded texts, or that end in the trie where no excluded text
    ends. The recursion is as deep as the longest excluded text, which is bounded."""
    children = {char: child for char, child in node.items() if char}
    if not children:  # a text ends here, and must not match
        return r"[\s\S]+"
    first = "".join(map(_in_class, sorted(children)))
    ways = [f"[^{first}][\\s\\S]*", *(_plain(char) + _other_than(child) for char, child in children.items())]
    return f"(?:{'|'.join(ways)})" + ("" if "" in node else "?")


def _plain(char: str) -> str:
    return "\\" + char if char in r".^$*+?()[]{}|\\/" else char


def _in_class(char: str) -> str:
    return "\\" + char if char in r"\]^-[&~" else char


_COMPLEMENTS: dict[str, Callable[[Any], Schema]] = {
    "type": _type,
    "const": _const,
    "enum": _enum,
    "not": lambda schema: schema,
    "required": _required,
    "properties": _properties,
    "anyOf": lambda schemas: all_of(map(complement, schemas)),
    "allOf": lambda schemas: any_of(map(complement, schemas)),
    "minimum": _minimum("exclusiveMaximum"),
    "maximum": _minimum("exclusiveMinimum"),
    "exclusiveMinimum": _minimum("maximum"),
    "exclusiveMaximum": _minimum("minimum"),
    "minLength": _at_least("string", "maxLength"),
    "maxLength": _at_most("string", "minLength"),
    "minItems": _at_least("array", "maxItems"),
    "maxItems": _at_most("array", "minItems"),
    "minProperties": _at_least("object", "maxProperties"),
    "maxProperties": _at_most("object", "minProperties"),
}
