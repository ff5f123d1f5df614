"""Grammars of tool calls: the name of a call is an offered function, and its arguments match that function's schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridle.structured_output import Constraint, JsonSchema, Lark
from bridle.structured_output.schema_limits import SchemaBounds, bounded
from bridle.structured_output.spec import TokenLark

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FLEXIBLE = {"whitespace_flexible": True}
#: Exponents are allowed, because models write constants such as 8.854e-12, and another number would result without
#: exponents.
_BOUNDS = SchemaBounds(exponents=True)
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a model may call. `parameters` is the JSON schema of its arguments. If the function is not
    strict, arguments of an optional call need not match the schema."""

    name: str
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """A grammar that an output must match. `grammar` is in Lark's notation; with `has_tokens`, it contains special
    tokens."""

    grammar: str
    has_tokens: bool = False

    def constraint(self) -> Constraint:
        return TokenLark(self.grammar) if self.has_tokens else Lark(self.grammar)


def one_of(functions: Sequence[Function], call: Callable[[Function], str]) -> str:
    """Return rules by which `one` is a call of any of the functions."""
    rules = [f"call_{number}: {call(function)}" for number, function in enumerate(functions)]
    return "\n".join(["one: " + " | ".join(f"call_{number}" for number in range(len(functions))), *rules, ""])


def json_call(function: Function, key: str) -> str:
    """Return the right side of a rule for a call as a JSON object, with its arguments under `key`."""
    head = f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "{key}": '
    return f"{quoted(head)} {arguments(function)} {quoted('}')}"


def arguments(function: Function, is_indented: bool = False) -> str:
    """Return the right side of a rule for JSON that matches the function's schema, with line breaks if `is_indented`.
    Raises `InvalidRequest` for an invalid schema."""
    schema: dict[str, Any] = bounded(json.loads(JsonSchema(dict(function.parameters or _ANY_OBJECT)).schema), _BOUNDS)
    schema.setdefault("type", "object")
    given = schema.get("x-guidance")
    schema["x-guidance"] = (_FLEXIBLE if is_indented else _LAYOUT) | (given if isinstance(given, dict) else {})
    return "%json " + json.dumps(schema, ensure_ascii=False)


def quoted(text: str) -> str:
    """Return a literal in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)
