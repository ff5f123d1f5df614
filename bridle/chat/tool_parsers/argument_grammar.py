"""Grammars of a call's arguments in the model's notation, typed by the function's schema.

A JSON schema constrains JSON arguments. Tagged, Python and quoted arguments are written one by one, in the order of the
properties.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from bridle.chat.tool_parsers import call_format as cf
from bridle.chat.tool_parsers.argument_values import types_of
from bridle.chat.tool_parsers.grammar import Function, arguments, quoted

_MAX_DEPTH = 8


class ArgumentGrammar:
    """Writes grammar rules in Lark's notation. `specials` maps the text of special tokens to their ids."""

    def __init__(self, form: cf.Arguments, specials: Mapping[str, int]) -> None:
        self._arguments_format = form
        self._specials = dict(specials)
        self._rules: list[str] = []
        self._is_indented = False
        self._call_end = ""  # the text after the arguments

    def _literal(self, text: str) -> str:
        """Return a Lark literal for the text, in which special tokens are written by id."""
        if not text:
            return '""'
        if not self._specials:
            return quoted(text)
        longest_first = sorted(self._specials, key=len, reverse=True)
        pieces = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
        made = [f"<[{self._specials[each]}]>" if each in self._specials else quoted(each) for each in pieces if each]
        return " ".join(made)

    def _first_special(self, text: str) -> int:
        return min((text.index(each) for each in self._specials if each in text), default=len(text))

    def _arguments(self, function: Function) -> str:
        """Return the right side of a rule for the arguments of a call."""
        match self._arguments_format:
            case cf.TaggedArguments() as tagged:
                return self._listed(function, lambda key, schema: self._tagged(tagged, key, schema), tagged.separator)
            case cf.PythonArguments():
                return self._listed(function, self._keyword, ", ")
            case cf.QuotedArguments(quote=quote):
                return self._listed(function, lambda key, schema: self._field(quote, key, schema), ",", is_sorted=True)
            case cf.JsonArguments():
                return arguments(function, self._is_indented)

    def _listed(self, function: Function, write: Any, separator: str, is_sorted: bool = False) -> str:
        """Return rules for arguments in the order of the schema's properties. Optional arguments may be left out."""
        schema = _resolved(function)
        properties, required = _mapping(schema.get("properties")), schema.get("required") or []
        parts = []
        for name in sorted(properties) if is_sorted else properties:
            self._rules.append(f"arg_{len(self._rules)}: {write(name, properties[name])}")
            parts.append((self._rules[-1].partition(":")[0], name in required))
        return self._sequence(parts, separator)

    def _sequence(self, parts: list[tuple[str, bool]], separator: str) -> str:
        """Return the rules in a sequence, with separators between the rules that are present."""
        if not parts:
            return '""'
        if not separator:
            return " ".join(rule if is_required else f"{rule}?" for rule, is_required in parts)
        between = self._literal(separator)
        # `rest_k` is what may follow after a written argument; `head_k` what may follow before the first one.
        rest, head = '""', '""'
        for rule, is_required in reversed(parts):
            new_rest = f"{between} {rule} {rest}" if is_required else f"({between} {rule})? {rest}"
            new_head = f"{rule} {rest}" if is_required else f"({rule} {rest} | {head})"
            rest = self._named(new_rest)
            head = self._named(new_head)
        return head

    def _named(self, right: str) -> str:
        self._rules.append(f"seq_{len(self._rules)}: {right}")
        return self._rules[-1].partition(":")[0]

    def _tagged(self, form: cf.TaggedArguments, key: str, schema: Any) -> str:
        kinds = types_of(schema)
        is_text = not kinds or "string" in kinds
        kind = "string" if is_text else next(iter(sorted(kinds)))
        middle = form.middles.get(kind, form.middles.get("any", ""))
        head = self._literal(form.opening) + " " + quoted(key) + " " + self._literal(middle)
        closing = form.closing.replace(cf.KEY, key)
        if is_text:
            return f"{head} {self._text_value(schema, closing, self._early_end(form, closing))}"
        return f"{head} {self._value(form, schema, 0)} {self._literal(closing)}"

    def _early_end(self, form: cf.TaggedArguments, closing: str) -> str:
        """Return a regular expression for texts that a string between tags must not contain. Parsers would read them as
        the end of the string, because white space around tags differs between models."""
        if form.is_nested:
            return pattern(form.opening.strip())
        behind = [pattern(form.opening.strip()), *([_spaced(self._call_end)] if self._call_end else [])]
        return rf"{_spaced(closing)}[ \t\n,]*({'|'.join(behind)})"

    def _value(self, form: cf.TaggedArguments, schema: Any, depth: int) -> str:
        """Return the rule for a value between tags that is not a string."""
        if form.is_nested and types_of(schema) <= {"object", "array"} and depth < _MAX_DEPTH:
            return self._nested(form, _mapping(schema), depth)
        if form.literals == "python" or (form.literals == "mixed" and types_of(schema) <= {"boolean", "null"}):
            return self._python(schema)
        return _json_value(schema)

    def _nested(self, form: cf.TaggedArguments, schema: Mapping[str, Any], depth: int) -> str:
        """Return the rule for an object as tags, or an array as tags of items."""
        if types_of(schema) == {"array"}:
            return self._named(self._nested_field(form, "item", schema.get("items"), depth)) + "*"
        properties, required = _mapping(schema.get("properties")), schema.get("required") or []
        made = [(self._named(self._nested_field(form, key, properties[key], depth)), key) for key in properties]
        return " ".join(rule if key in required else f"{rule}?" for rule, key in made) or '""'

    def _nested_field(self, form: cf.TaggedArguments, key: str, schema: Any, depth: int) -> str:
        kinds = types_of(schema)
        if not kinds or "string" in kinds:
            return self._tagged(form, key, schema)
        middle = self._literal(form.middles.get("any", ""))
        closing = self._literal(form.closing.replace(cf.KEY, key))
        return f"{self._literal(form.opening)} {quoted(key)} {middle} {self._value(form, schema, depth + 1)} {closing}"

    def _text_value(self, schema: Any, closing: str, without: str = "") -> str:
        """Return the rule for a string without quotes, and its end. The string contains no match of `without`."""
        options = _options(schema)
        if options:
            return "(" + " | ".join(map(quoted, options)) + ") " + self._literal(closing)
        special = self._first_special(closing)
        if special == 0:
            return f"{self._free(without)} {self._literal(closing)}"
        mark = closing[:special]
        other = f" & ~/(?s:.*)({without})(?s:.*)/" if without else ""
        self._rules.append(f"text_{len(self._rules)}[suffix={quoted(mark)}]: /(?s:.*)/{other}")
        name = self._rules[-1].partition("[")[0]
        return f"{name} {self._literal(closing[special:])}" if closing[special:] else name

    def _free(self, without: str) -> str:
        """Return a terminal for any text that contains no match of `without`."""
        if not without:
            return "/(?s:.*)/"
        self._rules.append(f"FREE_{len(self._rules)}: /(?s:.*)/ & ~/(?s:.*)({without})(?s:.*)/")
        return self._rules[-1].partition(":")[0]

    def _keyword(self, key: str, schema: Any) -> str:
        return f"{quoted(key + '=')} {self._python(schema)}"

    def _python(self, schema: Any) -> str:
        options, kinds = _options(schema), types_of(schema)
        if options:
            return "(" + " | ".join(quoted(repr(each)) for each in options) + ")"
        made = {
            "string": r"""/'([^'\\\n]|\\.)*'|"([^"\\\n]|\\.)*"/""",
            "boolean": '("True" | "False")',
            "null": '"None"',
        }
        known = [made[kind] if kind in made else self._python_other(kind, _mapping(schema)) for kind in sorted(kinds)]
        return "(" + " | ".join(known or [made["string"], _json_value({})]) + ")"

    def _python_other(self, kind: str, schema: Mapping[str, Any]) -> str:
        """Return the rule for a number, a list or a dictionary. Objects may be JSON, too, because some templates write
        JSON within Python."""
        if kind == "array":
            item = self._named(self._python(schema.get("items")))
            return f'"[" ({item} (", " {item})*)? "]"'
        plain = _json_value({**schema, "type": kind})
        properties, required = _mapping(schema.get("properties")), schema.get("required") or []
        if kind != "object" or not properties:
            return plain
        fields = [
            (self._named(f"{quoted(repr(key) + ': ')} {self._python(each)}"), key in required)
            for key, each in properties.items()
        ]
        return f'("{{" {self._sequence(fields, ", ")} "}}" | {plain})'

    def _field(self, quote: str, key: str, schema: Any) -> str:
        return f"{quoted(key + ':')} {self._quoted_value(quote, schema, 0)}"

    def _quoted_value(self, quote: str, schema: Any, depth: int) -> str:
        options, kinds = _options(schema), types_of(schema)
        mark = self._literal(quote)
        if options:
            return f"{mark} (" + " | ".join(map(quoted, options)) + f") {mark}"
        if kinds == {"array"} and depth < _MAX_DEPTH:
            inner = self._named(self._quoted_value(quote, _mapping(schema).get("items"), depth + 1))
            return f'"[" ({inner} ("," {inner})*)? "]"'
        if kinds == {"object"} and depth < _MAX_DEPTH:
            return self._quoted_object(quote, _mapping(schema), depth)
        if kinds and "string" not in kinds:
            return _json_value(schema)
        text = f"{mark} {self._text_value(None, quote)}"
        return text if kinds else f"({text} | {_json_value({'type': ['number', 'boolean', 'null']})})"

    def _quoted_object(self, quote: str, schema: Mapping[str, Any], depth: int) -> str:
        properties, required = _mapping(schema.get("properties")), schema.get("required") or []
        parts = []
        for name in sorted(properties):
            value = self._quoted_value(quote, properties[name], depth + 1)
            parts.append((self._named(f"{quoted(name + ':')} {value}"), name in required))
        return f'"{{" {self._sequence(parts, ",")} "}}"'


def pattern(text: str) -> str:
    """Return a regular expression that matches a text, in the form between slashes."""
    return re.escape(text).replace("\\\n", "\\n").replace("/", "\\/")


def _spaced(text: str) -> str:
    """Return a regular expression that matches a text with any white space between its words."""
    return r"\s*".join(map(pattern, text.split()))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _resolved(function: Function) -> Mapping[str, Any]:
    """Return the function's schema, with its local references resolved."""
    schema = dict(function.parameters or {})
    definitions = {f"#/{name}/{key}": value for name in ("$defs", "definitions")
                   for key, value in _mapping(schema.get(name)).items()}  # fmt: skip
    found = _replaced(schema, definitions, 0)
    return found if isinstance(found, Mapping) else {}


def _replaced(value: Any, definitions: Mapping[str, Any], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        return {}
    if isinstance(value, Mapping):
        target = value.get("$ref")
        if isinstance(target, str) and target in definitions:
            return _replaced(definitions[target], definitions, depth + 1)
        return {key: _replaced(each, definitions, depth) for key, each in value.items()}
    return [_replaced(each, definitions, depth) for each in value] if isinstance(value, list) else value


def _options(schema: Any) -> list[str]:
    """Return the strings of a schema's `enum` or `const`; empty if the schema has none."""
    given = _mapping(schema)
    options = given.get("enum", [given["const"]] if "const" in given else [])
    return list(options) if isinstance(options, list) and all(isinstance(each, str) for each in options) else []


def _json_value(schema: Any) -> str:
    wide = arguments(Function("", {"type": "object", "properties": {"v": schema}}))
    inner = json.loads(wide.removeprefix("%json "))
    value = dict(_mapping(inner["properties"]["v"]))
    return "%json " + json.dumps({**value, "x-guidance": inner["x-guidance"]}, ensure_ascii=False)
