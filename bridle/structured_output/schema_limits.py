"""Adds limits to a schema that states none. Without limits, a weak model would generate digits and properties without
end.

The added limits only narrow a schema, so every text that they allow fits the schema. If a schema states a limit, that
limit applies. If narrowing one part could change the meaning of another (`allOf`, `oneOf`, `not`, ...), nothing is
narrowed. A schema can override these limits: `"x-limits": false` turns them off, `"x-limits": {"digits": 30}` sets one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from bridle.errors import InvalidRequest
from bridle.safe_repr import short_repr
from bridle.structured_output.checks import PARAM

OPTION = "x-limits"
_MAX_DIGITS, _MAX_DECIMALS = 300, 9

#: Keywords that depend on other parts of a schema, whose meaning would change if those parts were narrowed.
_ENTANGLED = frozenset(
    {
        "allOf", "oneOf", "not", "if", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef", "contains",
        "unevaluatedProperties", "unevaluatedItems", "propertyNames",
    }
)  # fmt: skip
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment", "deprecated", "readOnly"})
_BOUNDS = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
_OPEN = frozenset({"additionalProperties", "patternProperties", "dependentRequired"})


@dataclass(frozen=True, slots=True)
class SchemaBounds:
    """Limits of numbers and objects. Numbers without bounds in the schema have at most `digits` digits before the
    decimal point, and `decimals` after it. With `exponents`, real numbers may also be written as `8.9e-12`; these digit
    limits then do not apply. If `closed`, objects have only the properties that the schema names, unless it says
    something about other properties."""

    digits: int = 15
    decimals: int = 9
    closed: bool = True
    exponents: bool = False


USUAL = SchemaBounds()
_MOST: Mapping[str, int] = {"digits": _MAX_DIGITS, "decimals": _MAX_DECIMALS, "closed": True, "exponents": True}


def bounded(schema: Mapping[str, Any], usual: SchemaBounds = USUAL) -> dict[str, Any]:
    """Return the schema narrowed by its limits: the `usual` limits, unless the schema sets its own. Raises
    `InvalidRequest` for invalid limits."""
    limits = _limits(schema.get(OPTION), usual)
    plain = {name: value for name, value in schema.items() if name != OPTION}
    if limits is None or any(map(_is_entangled, _nodes(plain))):
        return plain
    narrowed = _narrowed(plain, limits)
    return narrowed if isinstance(narrowed, dict) else plain


def _limits(given: Any, usual: SchemaBounds) -> SchemaBounds | None:
    if given is None or given is True:
        return usual
    if given is False:
        return None
    kinds: dict[str, type] = {each.name: type(getattr(USUAL, each.name)) for each in fields(SchemaBounds)}
    if not isinstance(given, Mapping):
        raise InvalidRequest(
            f"{OPTION} is {short_repr(given)}; must be false, or an object with {', '.join(kinds)}", PARAM
        )
    for name, value in given.items():
        most = _MOST.get(name)
        if most is None:
            raise InvalidRequest(f"{OPTION} has no field {short_repr(name)}; known are {', '.join(kinds)}", PARAM)
        if not isinstance(value, int) or type(value) is not kinds[name] or not (name == "digits") <= value <= most:
            raise InvalidRequest(f"{OPTION}.{name} is {short_repr(value)}; must be at most {most}", PARAM)
    return replace(usual, **given)


def _inner(node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly below a node, each with the keyword that contains it."""
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(node.get(keyword), Mapping):
            yield from ((keyword, each) for each in node[keyword].values())
    for keyword in ("anyOf", "prefixItems"):
        if isinstance(node.get(keyword), list):
            yield from ((keyword, each) for each in node[keyword])
    for keyword in ("items", "additionalProperties"):
        yield keyword, node.get(keyword)


def _nodes(node: Any) -> Iterator[Mapping[str, Any]]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping):
            yield node
            waiting += [each for _, each in _inner(node)]


def _is_entangled(node: Mapping[str, Any]) -> bool:
    """Return whether narrowing one keyword of the schema could widen another, or leave no valid value."""
    beside = node.keys() - _ANNOTATIONS - {"$defs", "definitions", "$schema", "$id", OPTION, "x-guidance"}
    is_joined = ("$ref" in beside or "anyOf" in beside) and len(beside) > 1
    return is_joined or not _ENTANGLED.isdisjoint(node)


def _narrowed(node: Any, limits: SchemaBounds) -> Any:
    if not isinstance(node, Mapping):
        return node
    found: dict[str, Any] = dict(node)
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(node.get(keyword), Mapping):
            found[keyword] = {name: _narrowed(each, limits) for name, each in node[keyword].items()}
    for keyword in ("anyOf", "prefixItems"):
        if isinstance(node.get(keyword), list):
            found[keyword] = [_narrowed(each, limits) for each in node[keyword]]
    for keyword in ("items", "additionalProperties"):
        if keyword in node:
            found[keyword] = _narrowed(node[keyword], limits)
    if "enum" in node or "const" in node:
        return found
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if limits.closed and _can_close(node):
        found["additionalProperties"] = False
    if "number" in kinds or "integer" in kinds:
        _bound(found, limits, has_fraction="number" in kinds)
    return found


def _can_close(node: Mapping[str, Any]) -> bool:
    named, required = node.get("properties"), node.get("required", [])
    if not isinstance(named, Mapping) or not named or not _OPEN.isdisjoint(node) or not isinstance(required, list):
        return False
    return set(map(str, required)) <= named.keys() and not (_number(node.get("minProperties")) or 0) > len(named)


def _bound(node: dict[str, Any], limits: SchemaBounds, has_fraction: bool) -> None:
    """Add bounds to sides (minimum, maximum) without a bound, unless they would leave no valid value."""
    if "multipleOf" in node:
        return
    if has_fraction and limits.exponents:
        return  # the compiler writes numbers between bounds without exponents
    most = 10**limits.digits - 1
    (low, has_low), (high, has_high) = (_side(node, names) for names in _BOUNDS)
    if low is None or high is None:
        return  # not a number: the compiler reports this
    low, high = low if has_low else -most, high if has_high else most
    if high - low < 2:
        return
    if not has_low:
        node["minimum"] = low
    if not has_high:
        node["maximum"] = high
    if has_fraction:
        node["multipleOf"] = float(f"1e-{limits.decimals}") if limits.decimals else 1


def _side(node: Mapping[str, Any], names: tuple[str, str]) -> tuple[float | None, bool]:
    """Return the minimum or maximum, and whether the schema has it. The bound is None if it is not a number."""
    given = [node[name] for name in names if name in node]
    if not given:
        return 0, False
    numbers = [_number(value) for value in given]
    return (None if None in numbers else numbers[0]), True


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
