"""Checks the parts of a constraint. Each check raises `InvalidRequest` with the value and the limit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from bridle.errors import InvalidRequest
from bridle.safe_repr import short_repr
from bridle.structured_output import limits

#: The field of a request that the errors name.
PARAM = "constraint"


def schema_text(schema: Any) -> str:
    """Return the JSON text of a schema."""
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        check_text(schema, "json_schema")
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"json_schema is not JSON: {str(error)[:200]}", PARAM) from None
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"json_schema is {short_repr(schema)}; must be an object", PARAM)
    check_depth(schema)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"json_schema is not JSON: {str(error)[:200]}", PARAM) from None
    return check_text(text, "json_schema")


def check_depth(value: Any) -> None:
    """Raise `InvalidRequest` for a schema that is nested too deeply, or has more values than a text of `MAX_BYTES` can
    have."""
    level: list[Any] = [value]
    depth = num_values = 0
    while level:
        depth += 1
        num_values += sum(map(len, level))
        if depth > limits.MAX_JSON_DEPTH:
            raise InvalidRequest(f"json_schema nests more than {limits.MAX_JSON_DEPTH} values", PARAM)
        if num_values > limits.MAX_BYTES // 2:
            raise InvalidRequest(f"json_schema holds {num_values} values; at most {limits.MAX_BYTES // 2}", PARAM)
        level = [inner for outer in level for inner in _children(outer) if isinstance(inner, (dict, list, tuple))]


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value


def check_text(text: Any, name: str) -> str:
    """Return the text, if it is a string, valid Unicode and short enough."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} is {short_repr(text)}; must be a text", PARAM)
    check_total(len(text), name)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} is not valid Unicode at character {error.start}", PARAM) from None
    check_total(size, name)
    return text


def check_total(size: int, name: str) -> None:
    """Raise `InvalidRequest` for a size above the limit."""
    if size > limits.MAX_BYTES:
        raise InvalidRequest(f"{name} has {size} bytes; at most {limits.MAX_BYTES}", PARAM)


def check_count(count: int, limit: int, name: str, what: str) -> None:
    """Raise `InvalidRequest` for a list that is empty or too long."""
    if not 1 <= count <= limit:
        raise InvalidRequest(f"{name} has {count} {what}; must have 1 to {limit}", PARAM)


def check_brackets(text: str, name: str) -> None:
    """Raise `InvalidRequest` for brackets that are nested too deeply. Escaped brackets do not count. Quoted brackets
    count, which is harmless if they match."""
    depth = deepest = 0
    skip = False
    for char in text:
        if skip:
            skip = False
        elif char == "\\":
            skip = True
        elif char == "(":
            depth += 1
            deepest = max(deepest, depth)
        elif char == ")":
            depth = max(depth - 1, 0)
    if deepest > limits.MAX_BRACKETS:
        raise InvalidRequest(f"{name} nests {deepest} brackets; at most {limits.MAX_BRACKETS}", PARAM)


def check_one_of(value: Any, known: tuple[Any, ...], name: str) -> None:
    """Raise `InvalidRequest` for a value that is not one of the known values."""
    if value not in known:
        raise InvalidRequest(f"{name} is {short_repr(value)}; must be {' or '.join(map(repr, known))}", PARAM)
