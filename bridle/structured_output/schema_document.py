"""Properties of a whole JSON schema document that are needed to rewrite a part of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from bridle.structured_output.complement import ANNOTATIONS, NoEquivalent, Schema, complement
from bridle.structured_output.exclusion import exclude
from bridle.structured_output.work_budget import WorkBudget

#: Keywords whose values are a schema, schemas by name, and lists of schemas.
_ONE = frozenset(
    {
        *("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else"),
        *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
    }
)
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_MANY = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_OLD_DRAFTS = re.compile(r"draft-0[34567]|2019-09")
_MAX_WAY = 16  # maximum number of references that lead to one another


def mapped(schema: Mapping[str, Any], change: Callable[[Schema], Schema]) -> dict[str, Any]:
    """Return `schema` with the function `change` applied to each schema directly inside it."""
    made = dict(schema)
    for name, value in schema.items():
        if name in _ONE and isinstance(value, Mapping):
            made[name] = change(value)
        elif name in _NAMED and isinstance(value, Mapping):
            made[name] = {key: change(inner) for key, inner in value.items()}
        elif name in _MANY and isinstance(value, list):
            made[name] = [change(inner) for inner in value]
    return made


def inner_schemas(schema: Schema) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield each value directly inside a schema that should be a schema (valid or not), with the keys that lead to it.
    Definitions come first."""
    given = schema if isinstance(schema, Mapping) else {}
    for name, value in sorted(given.items(), key=lambda item: item[0] not in ("$defs", "definitions")):
        if name in _NAMED and isinstance(value, Mapping):
            yield from (((name, key), inner) for key, inner in value.items())
        elif name in _MANY and isinstance(value, list):
            yield from (((name, place), inner) for place, inner in enumerate(value))
        elif name in _ONE:
            yield (name,), value


@dataclass(frozen=True, slots=True)
class SchemaDialect:
    """Properties of a schema document: the syntax of item lists (old or new), whether dynamic references are
    unambiguous, and the remaining work budget."""

    is_old: bool
    anchors: frozenset[str]
    is_one_resource: bool
    root: Schema
    work: WorkBudget = field(default_factory=WorkBudget)

    @classmethod
    def of(cls, schema: Schema) -> SchemaDialect:
        found: list[str] = []
        num_ids = 0
        rest: list[Any] = [schema]
        while rest:
            value = rest.pop()
            if isinstance(value, Mapping):
                if isinstance(value.get("$dynamicAnchor"), str):
                    found.append(value["$dynamicAnchor"])
                num_ids += value is not schema and isinstance(value.get("$id"), str)
                rest += value.values()
            elif isinstance(value, list):
                rest += value
        named = schema.get("$schema", "") if isinstance(schema, Mapping) else ""
        unique = frozenset(name for name, times in Counter(found).items() if times == 1)
        return cls(bool(_OLD_DRAFTS.search(str(named))), unique, not num_ids, schema)

    def find(self, reference: str) -> Schema | None:
        """Return the target of a reference within the document; None for any other reference."""
        if not self.is_one_resource or not reference.startswith("#"):
            return None
        node: Any = self.root
        for part in unquote(reference[1:]).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            inner = node.get(name) if isinstance(node, Mapping) else None
            if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                inner = node[int(name)]
            if inner is None:
                return None
            node = inner
        return node if reference in ("#", "#/") or "/" in reference else None

    def exclude(self, one: Schema, other: Schema) -> bool:
        """Return whether no value fits both schemas; False if this cannot be decided."""
        return exclude(one, other, self.find, self.work)

    def complement(self, schema: Schema) -> Schema:
        """Return the complement of a schema that may contain references. Raises `NoEquivalent`."""
        return complement(self._resolved(schema, ()))

    def _resolved(self, schema: Schema, way: tuple[str, ...]) -> Schema:
        """Return the schema with each reference replaced by its target."""
        if not isinstance(schema, Mapping):
            return schema
        if not self.work.spend():
            raise NoEquivalent("the schema with its references resolved has too many parts")
        reference = schema.get("$ref")
        if reference is None:
            return mapped(schema, lambda inner: self._resolved(inner, way))
        target = self.find(reference) if isinstance(reference, str) else None
        if target is None or reference in way or len(way) >= _MAX_WAY or set(schema) - ANNOTATIONS - {"$ref"}:
            raise NoEquivalent(f"{reference} cannot be replaced by its target")
        return self._resolved(target, (*way, reference))
