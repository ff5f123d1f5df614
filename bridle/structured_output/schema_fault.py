"""Finds the part of a JSON schema that llguidance refuses. llguidance's messages do not name the part, so each part is
tried alone. The fault is in the innermost part that llguidance refuses with the same message."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from bridle.errors import BridleError, InvalidRequest
from bridle.safe_repr import short_repr
from bridle.structured_output import limits
from bridle.structured_output.compile_sandbox import CompileSandbox, GrammarRefused
from bridle.structured_output.complement import Schema
from bridle.structured_output.grammar import grammar_of
from bridle.structured_output.schema_document import inner_schemas
from bridle.structured_output.spec import JsonSchema

_PLAIN_NAME = re.compile(r"[\w$-]{1,80}")
_MAX_SHOWN = 400  # characters of a path
Part = tuple[tuple[str | int, ...], Schema]


def fault_path(constraint: JsonSchema, trials: CompileSandbox, refusal: GrammarRefused) -> str:
    """Return the path of the part of a schema that llguidance refuses, such as `properties.age.type`. The path ends
    early, or is empty, if the part cannot be found, or if the search takes too long."""
    path: list[str | int] = []
    with suppress(BridleError):
        for keys in _search(json.loads(constraint.schema), _tester(constraint, trials, str(refusal))):
            path += keys
    text = "".join(map(_step, path)).removeprefix(".")
    return text if len(text) <= _MAX_SHOWN else f"...{text[-_MAX_SHOWN:]}"


def _step(key: str | int) -> str:
    is_plain = isinstance(key, str) and _PLAIN_NAME.fullmatch(key)
    return f".{key}" if is_plain else f"[{short_repr(key)}]"


def _tester(constraint: JsonSchema, trials: CompileSandbox, message: str) -> Callable[[Sequence[Schema]], bool]:
    """Return a function that compiles several schemas, and says whether they are refused with this message."""
    root = json.loads(constraint.schema)
    shared = {name: root[name] for name in ("$schema", "$defs", "definitions") if name in root}
    num_bytes, seconds = limits.MAX_BYTES, trials.limits.seconds  # together no more than one costly schema

    def is_refused(schemas: Sequence[Schema]) -> bool:
        nonlocal num_bytes, seconds
        grammar = grammar_of(replace(constraint, schema={**shared, "anyOf": list(schemas)}))
        num_bytes -= len(grammar)
        if num_bytes < 0 or seconds < 0:
            raise InvalidRequest("the search for the faulty part of the schema takes too long")
        found, taken = trials.refusal_of(grammar)
        seconds -= taken
        return found == message

    return is_refused


def _search(schema: Schema, is_refused: Callable[[Sequence[Schema]], bool]) -> Iterator[Sequence[str | int]]:
    """Yield the keys that lead from the root of the schema to the fault."""
    part: Part | None = ((), schema)
    while part is not None:
        yield part[0]
        schema = part[1]
        part = _refused_part(list(inner_schemas(schema)), is_refused)
    if isinstance(schema, dict):
        needed = [name for name in schema if not is_refused([{key: schema[key] for key in schema if key != name}])]
        others = [name for name in needed if name != "type"]
        yield (others or needed)[:1] if len(others) < 2 else ()


def _refused_part(parts: list[Part], is_refused: Callable[[Sequence[Schema]], bool]) -> Part | None:
    while len(parts) > 1:
        half = len(parts) // 2
        parts = parts[:half] if is_refused([schema for _, schema in parts[:half]]) else parts[half:]
    return parts[0] if parts and is_refused([parts[0][1]]) else None
