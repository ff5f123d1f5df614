"""Decides whether two JSON schemas exclude each other, which means that no value fits both. If the branches of a
`oneOf` exclude each other, they can be joined.

The decision uses types, listed values, bounds, references within the document, and required properties that exclude
each other. In any other case, the schemas count as overlapping, so a result of True is always right. The work for a
whole document is limited, because alternatives multiply.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any

from bridle.structured_output.complement import Schema
from bridle.structured_output.work_budget import WorkBudget

_ANY = ("object", "array", "string", "number", "boolean", "null")
_MAX_FACTS = 32  # maximum number of schemas that all apply to a value
_MAX_DEPTH = 12  # maximum depth of nested alternatives and properties
#: The keywords that bound values of a type from below and from above.
_BOUNDS: Mapping[str, tuple[str, str]] = {
    "number": ("minimum", "maximum"),
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}

#: Resolves a reference: returns the schema that it means, or None.
Find = Callable[[str], Schema | None]
_Node = Mapping[str, Any]


def exclude(one: Schema, other: Schema, find: Find, work: WorkBudget) -> bool:
    """Return whether no value fits both schemas; False if the remaining `work` for their document does not suffice."""
    return _Question(find, work).exclude(one, other, 0)


def listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists; None if it lists no values."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types of values that a schema allows; `number` is included with `integer`."""
    given = schema.get("type", _ANY)
    names = {given} if isinstance(given, str) else set(given)
    if not names <= {*_ANY, "integer"}:
        return set(_ANY)  # another draft may know the type's name
    return names | {"number"} if "integer" in names else names


class _Question:
    """Checks one pair of schemas."""

    def __init__(self, find: Find, work: WorkBudget) -> None:
        self._find = find
        self._work = work

    def exclude(self, one: Schema, other: Schema, depth: int) -> bool:
        if one is False or other is False:
            return True
        if depth > _MAX_DEPTH or not self._work.spend():
            return False
        ours, theirs = self._facts(one), self._facts(other)
        return (
            any(self._clash(a, b) for a in ours for b in theirs)
            or self._properties_clash(ours, theirs, depth + 1)
            or self._alternatives_clash(ours, other, depth + 1)
            or self._alternatives_clash(theirs, one, depth + 1)
        )

    def _facts(self, schema: Schema) -> list[_Node]:
        """Return the schemas that apply to every value of `schema`, such as those in its `allOf`. Keywords next to a
        reference count only in some drafts."""
        found: list[_Node] = []
        rest, seen = [schema], set()
        while rest and len(found) < _MAX_FACTS:
            node = rest.pop()
            if not isinstance(node, Mapping):
                continue
            reference = node.get("$ref")
            if not isinstance(reference, str):
                found.append(node)
                rest += node.get("allOf", ())
            elif reference not in seen:
                seen.add(reference)
                rest.append(self._find(reference))
        return found

    def _properties_clash(self, ours: Sequence[_Node], theirs: Sequence[_Node], depth: int) -> bool:
        """Return whether the schemas require a property of an object that they also forbid."""
        if not any(types(node) == {"object"} for node in (*ours, *theirs)):
            return False
        lists = [node.get("required") for node in (*ours, *theirs)]
        needed = {name for names in lists if isinstance(names, list) for name in names}
        return any(
            self.exclude(_property(a, name), _property(b, name), depth) for name in needed for a in ours for b in theirs
        )

    def _alternatives_clash(self, facts: Sequence[_Node], other: Schema, depth: int) -> bool:
        """Return whether `other` excludes each alternative of an `anyOf` or `oneOf` in `facts`."""
        ways = [node[name] for node in facts for name in ("anyOf", "oneOf") if node.get(name)]
        return any(all(self.exclude(way, other, depth) for way in each) for each in ways)

    def _clash(self, one: _Node, other: _Node) -> bool:
        """Return whether the types, values and bounds of two schemas exclude each other."""
        common = types(one) & types(other)
        if all(_are_beyond(one, other, kind) or _are_beyond(other, one, kind) for kind in common - {"integer"}):
            return True
        ours, theirs = listed(one), listed(other)
        if not self._work.spend(1 + len(ours or ()) + len(theirs or ())):
            return False
        if ours is not None and theirs is not None and not _keys(ours) & _keys(theirs):
            return True
        pairs = ((ours, other), (theirs, one))
        return any(values is not None and not any(self._may_fit(v, node) for v in values) for values, node in pairs)

    def _may_fit(self, value: Any, node: _Node) -> bool:
        """Return whether a value may fit a schema, judged by the value's type, length and pattern."""
        if _type_of(value) not in types(node):
            return False
        if not isinstance(value, str):
            return True
        if not _number(node.get("minLength"), 0) <= len(value) <= _number(node.get("maxLength"), inf):
            return False
        return "pattern" not in node or self._work.matches(node["pattern"], value) is not False


def _property(node: _Node, name: str) -> Schema:
    """Return the schema of the property with this name."""
    own = node.get("properties", {})
    if name in own:
        return own[name]
    return node.get("additionalProperties", True) if not node.get("patternProperties") else True


def _are_beyond(one: _Node, other: _Node, kind: str) -> bool:
    """Return whether, for values of one type, the minimum in one schema exceeds the maximum in the other."""
    low, high = _BOUNDS.get(kind, ("", ""))
    return _number(one.get(low), -inf) > _number(other.get(high), inf)


def _number(value: Any, otherwise: float) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else otherwise


def _keys(values: Iterable[Any]) -> set[str]:
    """Return JSON values as distinct texts: true and 1 differ (unlike in Python), while 1.0 and 1 do not."""
    whole = (int(value) if isinstance(value, float) and value.is_integer() else value for value in values)
    return {json.dumps(value, sort_keys=True) for value in whole}


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    kinds = ((str, "string"), (list, "array"), (Mapping, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "number")
