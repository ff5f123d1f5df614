"""Rewrites JSON schemas to equivalent schemas whose keywords llguidance supports.

If no rule gives an equivalent of a keyword, it stays unchanged, and llguidance refuses it by name; no keyword with a
meaning is dropped. Rewriting is used only for schemas that llguidance refused in their original form, because
equivalents can be long. A keyword has the meaning of the draft that defines it, whatever draft the schema names. This
module does not make grammars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import permutations
from math import perm
from typing import Any

from bridle.errors import InvalidRequest
from bridle.structured_output.complement import ANNOTATIONS, NoEquivalent, Schema, absent, all_of, any_of
from bridle.structured_output.exclusion import listed, types
from bridle.structured_output.formats import FORMATS, is_known
from bridle.structured_output.schema_document import SchemaDialect, mapped

_APPLICATORS = ("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas")
_DIALECT = re.compile(r"\Ahttps?://json-schema\.org/(draft-0[4-7]|draft/20(?:19-09|20-12))/schema#?\Z")
_MAX_LISTS = 400  # maximum number of lists that replace a list of distinct values
_MAX_PLACES = 16  # maximum number of positions in which an item of a kind is searched
_MAX_BRANCHES = 24
#: Maximum number of nodes of an equivalent: rules multiply nodes, and a schema must stay within the limits of requests.
_MAX_NODES = 50_000


def equivalent_text(schema: str) -> str:
    """Return the JSON text of an equivalent schema; the unchanged text if all keywords are supported."""
    given = json.loads(schema)
    try:
        made = equivalent(given)
    except (InvalidRequest, RecursionError, TypeError, ValueError, ArithmeticError, AttributeError):
        return schema  # malformed or too large: llguidance reports this for the original
    return schema if made == given else json.dumps(made, ensure_ascii=False)


def equivalent(schema: Schema) -> Schema:
    """Return an equivalent schema with supported keywords. Raises `InvalidRequest` if it is too large."""
    dialect = SchemaDialect.of(schema)
    made = _Rewriter(dialect).schema(schema)
    if isinstance(made, dict) and isinstance(name := made.get("$schema"), str):
        made["$schema"] = _DIALECT.sub(_spelled, name)
    return made


def _spelled(name: re.Match[str]) -> str:
    """Return the standard name of a schema draft, for a `$schema` URL with another scheme or ending."""
    draft = name[1]
    return f"http://json-schema.org/{draft}/schema#" if draft[5] == "-" else f"https://json-schema.org/{draft}/schema"


class _Rewriter:
    def __init__(self, dialect: SchemaDialect) -> None:
        self.dialect = dialect
        self._num_nodes = 0

    def schema(self, schema: Schema) -> Schema:
        """Rewrite a schema, from the innermost schemas outwards."""
        if not isinstance(schema, Mapping):
            return schema
        made = mapped(schema, self.schema)
        more: list[Schema] = []
        for rule in _RULES:
            try:
                more += rule(made, self.dialect)
            except NoEquivalent:
                continue
        if more:
            made["allOf"] = [*made.get("allOf", []), *more]
        self._count(made)
        return made

    def _count(self, made: Mapping[str, Any]) -> None:
        """Count the nodes that a rewriting rule made, because the rule may have copied many."""
        rest: list[Any] = [made]
        while rest:
            value = rest.pop()
            self._num_nodes += 1
            if self._num_nodes > _MAX_NODES:
                raise InvalidRequest(f"the equivalent schema has more than {_MAX_NODES} parts")
            if isinstance(value, Mapping):
                rest += value.values()
            elif isinstance(value, list):
                rest += value


# -- rules: each removes keywords from a schema and returns the schemas that must hold in addition -----------

_Made = dict[str, Any]
_Rule = Callable[[_Made, SchemaDialect], list[Schema]]


def _references(made: _Made, dialect: SchemaDialect) -> list[Schema]:
    anchor = made.get("$dynamicAnchor")
    if anchor in dialect.anchors and "$anchor" not in made:
        made["$anchor"] = made.pop("$dynamicAnchor")
    target = made.get("$dynamicRef")
    if isinstance(target, str) and target[:1] == "#" and target[1:] in dialect.anchors and "$ref" not in made:
        made["$ref"] = made.pop("$dynamicRef")
    if dialect.is_one_resource:
        made.pop("$recursiveAnchor", None)
        if made.get("$recursiveRef") == "#" and "$ref" not in made:
            made["$ref"] = made.pop("$recursiveRef")
    return []


def _format(made: _Made, dialect: SchemaDialect) -> list[Schema]:
    if "format" not in made or is_known(made["format"]):
        return []
    known = FORMATS.get(str(made.pop("format")))
    if known is None:
        return []
    return [any_of([{"type": ["object", "array", "number", "boolean", "null"]}, {"type": "string", **known}])]


def _dependencies(made: _Made, dialect: SchemaDialect) -> list[Schema]:
    more: list[Schema] = []
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        for name, needed in made.pop(keyword, {}).items():
            wanted = {"required": needed} if isinstance(needed, list) else needed
            more.append(any_of([absent([name]), all_of([{"required": [name]}, wanted])]))
    return more


def _condition(made: _Made, dialect: SchemaDialect) -> list[Schema]:
    if "if" not in made or not {"then", "else"} & made.keys():
        for name in ("if", "then", "else"):  # each keyword has an effect only together with the others
            made.pop(name, None)
        return []
    given = made["if"]
    holds = all_of([given, made.get("then", True)])
    fails = all_of([dialect.complement(given), made.get("else", True)])
    for name in ("if", "then", "else"):
        made.pop(name, None)
    return [any_of([holds, fails])]


def _negation(made: _Made, dialect: SchemaDialect) -> list[Schema]:
    if "not" not in made:
        return []
    wrong = dialect.complement(made["not"])
    del made["not"]
    return [wrong]


def _one_of(made: _Made, dialect: SchemaDialect) -> list[Schema]:
    """Join the branches of a `oneOf` that exclude each other."""
    branches = made.get("oneOf")
    if branches is None or not 2 <= len(branches) <= _MAX_BRANCHES:
        return []
    found = []
    for place, one in enumerate(branches):
        rest = branches[:place] + branches[place + 1 :]
        others = [other for other in rest if not dialect.exclude(one, other)]
        found.append(all_of([one, *map(dialect.complement, others)]))
    del made["oneOf"]
    return [any_of(found)]


def _texts(schema: Mapping[str, Any]) -> list[str] | None:
    """Return the texts that a schema lists; None if it allows any other value."""
    values = listed(schema)
    return values if values and all(isinstance(value, str) for value in values) else None


def _unevaluated(made: _Made, dialect: SchemaDialect) -> list[Schema]:
    if any(name in made for name in _APPLICATORS):
        return []
    if "unevaluatedProperties" in made:
        made.setdefault("additionalProperties", made.pop("unevaluatedProperties"))
    if "unevaluatedItems" in made and "contains" not in made:
        value = made.pop("unevaluatedItems")
        if not isinstance(made.get("items"), list):
            made.setdefault("items", value)
        else:
            made.setdefault("additionalItems", value)
    return []


def _property_names(made: _Made, dialect: SchemaDialect) -> list[Schema]:
    names = made.get("propertyNames")
    if names is None:
        return []
    others = made.get("additionalProperties", True)
    own = made.get("properties", {})
    pattern = _pattern_of(names)
    if "patternProperties" in made or (own and not isinstance(others, bool)):
        raise NoEquivalent("propertyNames cannot be combined with schemas of other properties")
    del made["propertyNames"]
    if pattern is None:  # any name is allowed
        return []
    fits = {name: dialect.work.matches(pattern, name) for name in own}
    if None in fits.values():
        made["propertyNames"] = names
        raise NoEquivalent("the pattern of propertyNames cannot be checked")
    wrong = [name for name, is_right in fits.items() if not is_right]
    if others is not False:
        made["patternProperties"], made["additionalProperties"] = {pattern: others}, False
    if wrong:
        made["properties"] = {**own, **dict.fromkeys(wrong, False)}
    return []


def _pattern_of(names: Schema) -> str | None:
    """Return the regex of a schema for property names; None if it allows every name. Raises `NoEquivalent`."""
    said = {} if names is True else {name: value for name, value in names.items() if name not in ANNOTATIONS}
    if said.get("type") == "string":
        del said["type"]
    if not said:
        return None
    if set(said) == {"pattern"}:
        return str(said["pattern"])
    listed = _texts(said)
    if listed is not None and len(said) == 1:
        return f"^(?:{'|'.join(map(re.escape, listed))})$"
    if set(said) <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{said.get('minLength', 0)},{said.get('maxLength', '')}}}$"
    raise NoEquivalent("propertyNames has more constraints than a regex")


def _distinct(made: _Made, dialect: SchemaDialect) -> list[Schema]:
    wanted = made.get("uniqueItems")
    if wanted is False or (wanted is True and made.get("maxItems", 2) <= 1):
        del made["uniqueItems"]
        return []
    items = made.get("items")
    if wanted is not True or not isinstance(items, Mapping) or {"prefixItems", "contains"} & made.keys():
        return []
    values = _texts(items)
    if (
        values is None
        or set(items) - ANNOTATIONS - {"enum", "const", "type"}
        or ("type" in items and types(items) - {"string"})
    ):
        raise NoEquivalent("uniqueItems needs items that are an enum of strings")
    values = list(dict.fromkeys(values))
    low, high = made.get("minItems", 0), min(made.get("maxItems", len(values)), len(values))
    if sum(perm(len(values), size) for size in range(low, high + 1)) > _MAX_LISTS:
        raise NoEquivalent("uniqueItems allows too many different lists")
    lists = [list(each) for size in range(low, high + 1) for each in permutations(values, size)]
    for name in ("uniqueItems", "items", "minItems", "maxItems"):
        made.pop(name, None)
    others = {"type": ["object", "string", "number", "boolean", "null"]}
    if "array" not in types(made):
        return [others]
    if types(made) == {"array"} and not set(made) - ANNOTATIONS - {"type"}:
        del made["type"]
        return [{"enum": lists} if lists else False]
    return [any_of([others, {"enum": lists} if lists else False])]


def _contains(made: _Made, dialect: SchemaDialect) -> list[Schema]:
    wanted = made.get("contains")
    low, high = made.get("minContains", 1), made.get("maxContains")
    if wanted is None or high is not None:
        return []
    if low == 0 or wanted is True or wanted == {}:
        made["minItems"] = max(made.get("minItems", 0), low)
    elif low == 1 and "maxItems" in made and made["maxItems"] <= _MAX_PLACES:
        if "prefixItems" in made or isinstance(made.get("items"), list):
            raise NoEquivalent("contains cannot be combined with prefixItems")
        return _somewhere(made, wanted, dialect)
    else:
        raise NoEquivalent("contains needs a small maxItems")
    made.pop("contains")
    made.pop("minContains", None)
    return []


def _somewhere(made: _Made, wanted: Schema, dialect: SchemaDialect) -> list[Schema]:
    """Return alternative schemas of lists, each with the wanted item at another possible position."""
    items = made.get("items", True)
    prefix, rest = ("items", "additionalItems") if dialect.is_old else ("prefixItems", "items")
    for name in ("contains", "minContains"):
        made.pop(name, None)
    ways: list[Schema] = [{"type": ["object", "string", "number", "boolean", "null"]}]
    for place in range(made["maxItems"]):
        first = [items] * place + [all_of([items, wanted])]
        ways.append({"type": "array", prefix: first, rest: items, "minItems": place + 1})
    return [any_of(ways)]


_RULES: tuple[_Rule, ...] = (
    _references,
    _unevaluated,
    _format,
    _property_names,
    _contains,
    _distinct,
    _dependencies,
    _condition,
    _negation,
    _one_of,
)
