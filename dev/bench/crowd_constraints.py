"""Malicious constraints that are large, deeply nested, or huge after compilation, and request bodies with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MAX_TOKENS = 8
_MANY = 10_000


def hostile_constraints() -> dict[str, Mapping[str, Any]]:
    """Return malicious constraints as plain data, by the kind of attack."""
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(90):
        nested = {"type": "array", "items": nested}
    schemas: dict[str, Any] = {
        "const of 500,000 characters": {"const": "ab" * 250_000},
        "enum of 10,000 objects": {"enum": [{"a": n, "b": [n, f"v{n}"]} for n in range(_MANY)]},
        "1,000 properties that may be left out": {"properties": {f"p{n}": {"type": "string"} for n in range(1_000)}},
        "90 arrays in each other": nested,
        "alternatives that are alike": {"anyOf": [{"properties": {"a": {"const": n}}} for n in range(1_000)]},
        "string of a million characters": {"type": "string", "minLength": 100_000, "maxLength": 1_000_000},
        "array of a million arrays": {
            "type": "array",
            "minItems": 1_000_000,
            "items": {"type": "array", "minItems": 1_000},
        },
        "pattern of repetitions": {"type": "string", "pattern": "^((a{1,500}b?){1,500}c){1,500}$"},
    }
    regexes = {
        "nested repetition": "((x{1,1000}){1,1000}y){1,1000}",
        "tower of stars": "(" * 100 + "a*" + ")*" * 100,
        "blow-up": "(a|b)*a(a|b){30}",
        "letters, counted": r"(\p{L}{1,50}\p{N}?){1,2000}",
        "options, counted": "(a?){3000}a{3000}",
    }
    return {
        **{name: {"regex": regex} for name, regex in regexes.items()},
        **{name: {"json_schema": schema} for name, schema in schemas.items()},
        "ambiguous grammar": {"lark": 'start: a\na: a a | a a a | "x" | "xx" |'},
        "10,000 choices": {"choice": [f"choice number {n}" for n in range(_MANY)]},
        "quotation": {"substring": "to be or not to be " * 1_000},
    }


def ordinary_constraint(number: int) -> Mapping[str, Any]:
    """Return a small harmless JSON schema, different for each number."""
    names = [f"name{number}", "age"]
    schema = {"type": "object", "properties": {names[0]: {"type": "string"}, names[1]: {"type": "integer"}}}
    return {"json_schema": schema | {"required": names}}


def constrained_bodies(constraint: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return a request body with the constraint for each route that supports constraints of any kind."""
    return {
        "/generate": {"inputs": "a", "parameters": {"max_new_tokens": _MAX_TOKENS, "constraint": constraint}},
        "/v1/completions": {"prompt": "a", "max_tokens": _MAX_TOKENS, "constraint": constraint},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": _MAX_TOKENS,
            "constraint": constraint,
        },
    }
