"""Grammars of calls in any format that is described by a `CallFormat`: what a model may write, as it writes it.

Markup that is a special token is named by its id; everything else is text. Arguments follow each function's schema:
JSON by the schema itself, tagged arguments one by one in the order of the schema's properties.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bridle.chat.tool_parsers.argument_values import types_of
from bridle.chat.tool_parsers.call_format import (
    ARGUMENTS,
    FIELDS,
    ID,
    INDEX,
    KEY,
    NAME,
    CallFormat,
    JsonArguments,
    PythonArguments,
    QuotedArguments,
    TaggedArguments,
)
from bridle.chat.tool_parsers.grammar import Function, arguments, quoted

#: The most calls of one output that a grammar lets pass where the request sets no limit.
MAX_CALLS = 64


class CallGrammar:
    """Writes grammars in Lark's notation. `specials` maps the text of special tokens to their ids."""

    def __init__(self, form: CallFormat, specials: Mapping[str, int]) -> None:
        self._form = form
        self._specials = {text: token for text, token in specials.items() if any(text in x for x in form.literals())}
        self._rules: list[str] = []

    def must_call(self, functions: Sequence[Function], max_calls: int) -> str:
        """The grammar of an output that is calls, one at least."""
        self._rules = []
        self._call_rules(functions)
        limit = min(max_calls, self._form.max_calls or max_calls)
        section = self._section(self._form.section_open, limit)
        return "\n".join([f"start: {section}", *self._rules, ""])

    def may_call(self, functions: Sequence[Function]) -> str:
        """The grammar of an output in which calls, if there are any, are right."""
        self._rules = []
        self._call_rules(functions)
        trigger, section = self._split_section()
        if self._form.is_bare or not trigger:
            self._rules.append(r"TEXT: /\s*([^\s\{](?s:.)*)?/")
            return "\n".join([f"start: {section} | TEXT", *self._rules, ""])
        if trigger in self._specials:
            self._rules.append("FREE: /(?s:.*)/")
            return "\n".join([f"start: (FREE {self._literal(trigger)} {section})* FREE", *self._rules, ""])
        self._rules.append(f"free[suffix={quoted(trigger)}]: /(?s:.*)/")
        self._rules.append(f"TAIL: /(?s:.*)/ & ~/(?s:.*){_pattern(trigger)}(?s:.*)/")
        return "\n".join([f"start: (free {section})* TAIL", *self._rules, ""])

    def _split_section(self) -> tuple[str, str]:
        """The text or special token that begins calls, and the grammar of what follows it."""
        form = self._form
        limit = form.max_calls or MAX_CALLS
        whole = form.section_open or form.opening
        special = next((text for text in self._specials if whole.startswith(text)), None)
        trigger = special or (whole[: min(self._first_special(whole), len(form.trigger))] if form.trigger else "")
        rest = whole[len(trigger) :]
        if form.section_open:
            return trigger, self._section(rest, limit)
        self._rules.append("first: " + " | ".join(f"first_{number}" for number in range(self._num_functions)))
        self._rules += [f"first_{number}: {self._call(each, rest)}" for number, each in enumerate(self._functions)]
        more = f" ({self._literal(form.separator)} one){{0,{limit - 1}}}" if limit > 1 else ""
        return trigger, f"first{more}"

    def _first_special(self, text: str) -> int:
        return min((text.index(each) for each in self._specials if each in text), default=len(text))

    def _section(self, opening: str, max_calls: int) -> str:
        form = self._form
        more = f" ({self._literal(form.separator)} one){{0,{max_calls - 1}}}" if max_calls > 1 else ""
        return f"{self._literal(opening)} one{more} {self._literal(form.section_close)}"

    def _call_rules(self, functions: Sequence[Function]) -> None:
        self._functions, self._num_functions = functions, len(functions)
        names = [f"call_{number}" for number in range(len(functions))]
        self._rules.append("one: " + " | ".join(names))
        self._rules += [f"{name}: {self._call(each)}" for name, each in zip(names, functions, strict=True)]

    def _call(self, function: Function, opening: str | None = None) -> str:
        """The right side of a rule: a call. `opening` replaces its first literal."""
        made: list[str] = []
        for place, part in enumerate(self._form.call):
            if place == 0 and opening is not None and part not in FIELDS:
                part = opening
            made.append(self._part(part, place, function))
        return " ".join(each for each in made if each) or '""'

    def _part(self, part: str, place: int, function: Function) -> str:
        if part == NAME:
            is_json = self._form.name_key is not None
            text = json.dumps(function.name, ensure_ascii=False)[1:-1] if is_json else function.name
            return quoted(text)
        if part == ID:
            return "/[0-9A-Za-z_]{1,40}/"
        if part == INDEX:
            return "/[0-9]{1,4}/"
        return self._arguments(function) if part == ARGUMENTS else self._literal(part)

    def _literal(self, text: str) -> str:
        """A literal, with special tokens by their ids."""
        if not text:
            return '""'
        if not self._specials:
            return quoted(text)
        longest_first = sorted(self._specials, key=len, reverse=True)
        pieces = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
        made = [f"<[{self._specials[each]}]>" if each in self._specials else quoted(each) for each in pieces if each]
        return " ".join(made)

    # -- arguments -----------------------------------------------------------------------------------------

    def _arguments(self, function: Function) -> str:
        match self._form.arguments:
            case TaggedArguments() as tagged:
                return self._listed(function, lambda key, schema: self._tagged(tagged, key, schema), tagged.separator)
            case PythonArguments():
                return self._listed(function, self._keyword, ", ")
            case QuotedArguments(quote=quote):
                return self._listed(function, lambda key, schema: self._field(quote, key, schema), ",", is_sorted=True)
            case JsonArguments():
                return arguments(function)

    def _listed(self, function: Function, write: Any, separator: str, is_sorted: bool = False) -> str:
        """Arguments in the order of the schema's properties; what is not required may be left out."""
        schema = _resolved(function)
        properties, required = _mapping(schema.get("properties")), schema.get("required") or []
        parts = []
        for name in sorted(properties) if is_sorted else properties:
            self._rules.append(f"arg_{len(self._rules)}: {write(name, properties[name])}")
            parts.append((self._rules[-1].partition(":")[0], name in required))
        return self._sequence(parts, separator)

    def _sequence(self, parts: list[tuple[str, bool]], separator: str) -> str:
        """Rules one after the other, with separators between those that are there."""
        if not parts:
            return '""'
        if not separator:
            return " ".join(rule if is_required else f"{rule}?" for rule, is_required in parts)
        between = self._literal(separator)
        # `rest_k` is what may follow once something was written; `head_k` what may come while nothing was.
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

    def _tagged(self, form: TaggedArguments, key: str, schema: Any) -> str:
        kinds = types_of(schema)
        is_text = not kinds or "string" in kinds
        kind = "string" if is_text else next(iter(sorted(kinds)))
        middle = form.middles.get(kind, form.middles.get("any", ""))
        head = self._literal(form.opening) + " " + quoted(key) + " " + self._literal(middle)
        closing = form.closing.replace(KEY, key)
        if is_text:
            return f"{head} {self._text_value(schema, closing)}"
        return f"{head} {self._value(form, schema, 0)} {self._literal(closing)}"

    def _value(self, form: TaggedArguments, schema: Any, depth: int) -> str:
        """A value that is not a string, between tags."""
        if form.is_nested and types_of(schema) <= {"object", "array"} and depth < _MAX_DEPTH:
            return self._nested(form, _mapping(schema), depth)
        if form.literals == "python" or (form.literals == "mixed" and types_of(schema) <= {"boolean", "null"}):
            return self._python(schema)
        return _json_value(schema)

    def _nested(self, form: TaggedArguments, schema: Mapping[str, Any], depth: int) -> str:
        """An object as tags, or an array as tags of items."""
        if types_of(schema) == {"array"}:
            return self._named(self._nested_field(form, "item", schema.get("items"), depth)) + "*"
        properties, required = _mapping(schema.get("properties")), schema.get("required") or []
        made = [(self._named(self._nested_field(form, key, properties[key], depth)), key) for key in properties]
        return " ".join(rule if key in required else f"{rule}?" for rule, key in made) or '""'

    def _nested_field(self, form: TaggedArguments, key: str, schema: Any, depth: int) -> str:
        kinds = types_of(schema)
        if not kinds or "string" in kinds:
            return self._tagged(form, key, schema)
        middle = self._literal(form.middles.get("any", ""))
        closing = self._literal(form.closing.replace(KEY, key))
        return f"{self._literal(form.opening)} {quoted(key)} {middle} {self._value(form, schema, depth + 1)} {closing}"

    def _text_value(self, schema: Any, closing: str) -> str:
        """A string without quotes, and its end."""
        options = _options(schema)
        if options:
            return "(" + " | ".join(map(quoted, options)) + ") " + self._literal(closing)
        special = self._first_special(closing)
        if special == 0:
            return f"/(?s:.*)/ {self._literal(closing)}"
        mark = closing[:special]
        self._rules.append(f"text_{len(self._rules)}[suffix={quoted(mark)}]: /(?s:.*)/")
        name = self._rules[-1].partition("[")[0]
        return f"{name} {self._literal(closing[special:])}" if closing[special:] else name

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
        """A number, a list or a dictionary; objects may be JSON too, which some templates write within Python."""
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


_MAX_DEPTH = 8


def _pattern(text: str) -> str:
    """A regular expression that matches a text, as it stands between slashes."""
    return re.escape(text).replace("\\\n", "\\n").replace("/", "\\/")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _resolved(function: Function) -> Mapping[str, Any]:
    """The function's schema with its local references in place."""
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
    """The strings among which a value is chosen; empty if it is not such a choice."""
    given = _mapping(schema)
    options = given.get("enum", [given["const"]] if "const" in given else [])
    return list(options) if isinstance(options, list) and all(isinstance(each, str) for each in options) else []


def _json_value(schema: Any) -> str:
    wide = arguments(Function("", {"type": "object", "properties": {"v": schema}}))
    inner = json.loads(wide.removeprefix("%json "))
    value = dict(_mapping(inner["properties"]["v"]))
    return "%json " + json.dumps({**value, "x-guidance": inner["x-guidance"]}, ensure_ascii=False)
