"""Parses arguments that models write in other notations than JSON: raw text, Python literals, and nested tags.

Each function returns a JSON value, or raises `ValueError`. Python text is parsed, never evaluated.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from bridle.literals import parse_expression

#: The maximum nesting depth of values.
MAX_DEPTH = 64


def types_of(schema: object) -> frozenset[str]:
    """Return the JSON types that a schema allows for the value itself; empty if the schema does not restrict the
    type."""
    if not isinstance(schema, Mapping):
        return frozenset()
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(each for each in given if isinstance(each, str))
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list):
        found = [types_of(each) for each in options]
        return frozenset().union(*found) if all(found) else frozenset()
    if isinstance(schema.get("enum"), list) and all(isinstance(each, str) for each in schema["enum"]):
        return frozenset({"string"})
    return frozenset()


def property_schema(schema: object, key: str) -> object:
    """Return the schema of a property; None if the schema has none."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(key) if isinstance(properties, Mapping) else None


def read_value(text: str, schema: object) -> Any:
    """Return a value that was written without quotes around strings. The schema decides between the string `3` and the
    number."""
    types = types_of(schema)
    if types == {"string"}:
        return text
    for read in (_json, _python):
        try:
            value = read(text.strip())
        except ValueError:
            continue
        if not types or _type(value) in types or (_type(value) == "integer" and "number" in types):
            return value
    if not types or "string" in types:
        return text
    raise ValueError(f"the value {text[:80]!r} has none of the types {sorted(types)}")


def typed(value: Any, schema: object) -> Any:
    """Return a value with the type of its schema, for formats that write all values between quotes."""
    types = types_of(schema)
    return read_value(value, schema) if isinstance(value, str) and types and "string" not in types else value


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _python(text: str) -> Any:
    """Return the JSON value of a Python literal. JSON's words `true`, `false` and `null` are accepted, too."""
    try:
        return _plain(parse_expression(text))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


_WORDS = {"true": True, "false": False, "null": None}


def _plain(node: ast.expr, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError("nested too deep")
    match node:
        case ast.Constant(value=str() | int() | float() | bool() | None):
            return node.value
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_plain(item, depth + 1) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_key(key): _plain(value, depth + 1) for key, value in pairs}
    raise ValueError("a value is not a literal")


def _key(node: ast.expr | None) -> str:
    value = None if node is None else _plain(node)
    if not isinstance(value, str):
        raise ValueError("the key of an argument is not a string")
    return value


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
    return names[type(value)]


def read_keywords(text: str, schema: object = None) -> dict[str, Any]:
    """Return the values of Python keyword arguments, such as `city='Rome', days=3`. Variants of templates are accepted:
    JSON without commas (`city="Rome"days=3`), strings without escapes or quotes, and other values between quotes."""
    for read in (_python_keywords, _json_keywords):
        try:
            found = read(text)
        except (SyntaxError, RecursionError, MemoryError, ValueError):
            continue
        return {key: _unquoted(value, property_schema(schema, key)) for key, value in found.items()}
    return _unescaped_keywords(text, schema)


def _unquoted(value: Any, schema: object) -> Any:
    """Return the value with the type of its schema, or unchanged if it cannot have that type."""
    try:
        return typed(value, schema)
    except ValueError:
        return value


def _python_keywords(text: str) -> dict[str, Any]:
    call = parse_expression(f"f({text}\n)")
    if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
        raise ValueError("not keyword arguments")
    return {str(each.arg): _plain(each.value) for each in call.keywords}


_KEY = re.compile(r"(?:, ?)?(\w+)=")


def _json_keywords(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    at = 0
    while at < len(text):
        head = _KEY.match(text, at)
        if head is None:
            raise ValueError("a key is missing")
        found[head[1]], at = _JSON.raw_decode(text, head.end())
    return found


_JSON = json.JSONDecoder()
_KEYWORD = re.compile(r"(?:\A|, ?)(\w+)=")
_VALUE = re.compile(r"['\"\[{\-\dTFN]")


def _unescaped_keywords(text: str, schema: object) -> dict[str, Any]:
    heads = [each for each in _KEYWORD.finditer(text) if _VALUE.match(text, each.end()) or _is_string(schema, each[1])]
    if not heads or heads[0].start():
        raise ValueError("not keyword arguments")
    found: dict[str, Any] = {}
    for place, head in enumerate(heads):
        raw = text[head.end() : heads[place + 1].start() if place + 1 < len(heads) else len(text)].strip()
        value = _unescaped(raw, _is_string(schema, head[1]))
        found[head[1]] = _unquoted(value, property_schema(schema, head[1]))
    return found


def _is_string(schema: object, key: str) -> bool:
    return types_of(property_schema(schema, key)) == {"string"}


def _unescaped(raw: str, is_string: bool) -> Any:
    if len(raw) > 1 and raw[0] in "'\"" and raw[-1] == raw[0]:
        return raw[1:-1]
    if is_string and raw[:1] not in ("'", '"') and raw.count("(") == raw.count(")"):
        return raw
    value = read_value(raw, None)
    if isinstance(value, str):
        raise ValueError("a value has no quotes")
    return value


# -- objects with bare keys and quoted strings --------------------------------------------------------------

_BARE_KEY = re.compile(r"\s*([^\s:,{}\[\]]+)\s*:\s*")
_ATOM = re.compile(r"[^,}\]]+")


class QuotedReader:
    """Reads the rest of `{city:<|"|>Rome<|"|>,days:3}` from a text that begins after the first brace."""

    def __init__(self, text: str, quote: str) -> None:
        self._text, self._quote, self._at = text, quote, 0

    def fields(self, end: str = "", depth: int = 0) -> dict[str, Any]:
        """Return the fields up to `end`, or up to the end of the text."""
        found: dict[str, Any] = {}
        while not self._is_at(end):
            key = self._key()
            found[key] = self._value(depth)
            self._skip(",")
        return found

    def _is_at(self, end: str) -> bool:
        self._spaces()
        if not end:
            return self._at >= len(self._text)
        if self._text.startswith(end, self._at):
            self._at += len(end)
            return True
        if self._at >= len(self._text):
            raise ValueError("the text ends inside an object")
        return False

    def _key(self) -> str:
        if self._text.startswith(self._quote, self._at):
            key = self._string()
            self._spaces()
            if not self._skip(":"):
                raise ValueError("no colon follows a key")
            return key
        found = _BARE_KEY.match(self._text, self._at)
        if found is None:
            raise ValueError("a key is missing")
        self._at = found.end()
        return found[1].strip('"')

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        self._spaces()
        if self._text.startswith(self._quote, self._at):
            return self._string()
        if self._skip("{"):
            return self.fields("}", depth + 1)
        if self._skip("["):
            return self._items(depth + 1)
        found = _ATOM.match(self._text, self._at)
        if found is None:
            raise ValueError("a value is missing")
        self._at = found.end()
        return read_value(found[0].strip(), None)

    def _items(self, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self._is_at("]"):
            items.append(self._value(depth))
            self._skip(",")
        return items

    def _string(self) -> str:
        start = self._at + len(self._quote)
        end = self._text.find(self._quote, start)
        if end < 0:
            raise ValueError("a string has no closing quote")
        self._at = end + len(self._quote)
        return self._text[start:end]

    def _spaces(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1

    def _skip(self, mark: str) -> bool:
        self._spaces()
        is_there = self._text.startswith(mark, self._at)
        self._at += len(mark) * is_there
        return is_there
