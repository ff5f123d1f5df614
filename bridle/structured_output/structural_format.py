"""Reads the `format` of a structural tag, as in xgrammar and vLLM: texts, schemas, regexes, grammars and free text,
combined by sequences, alternatives and tags.

{"type": "sequence", "elements": [
    {"type": "const_string", "value": "So: "},
    {"type": "tag", "begin": "<call>", "content": {"type": "json_schema", "json_schema": {...}}, "end": "</call>"}]}

A format becomes a single grammar. Free text ends where the fixed text that follows it begins. Free text that is
followed by anything other than fixed text is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.safe_repr import short_repr
from bridle.structured_output import limits
from bridle.structured_output.checks import PARAM, check_count
from bridle.structured_output.gbnf import gbnf_to_lark, is_gbnf
from bridle.structured_output.schema_limits import bounded
from bridle.structured_output.spec import JsonSchema, Lark, Regex

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY = "ANY: /(?s:.*)/"
_NOTHING = '""'


def format_grammar(form: Any) -> str:
    """Return the grammar of a format, in Lark's notation. Raises `InvalidRequest`, which names the invalid part."""
    rules = _Rules()
    start = rules.sequence(rules.parts(form, "structural_tag.format"), is_end=True)
    return "\n".join([f"start: {start}", _ANY, *rules.lines, ""])


def json_part(schema: Any) -> str:
    """Return a schema as a part of a grammar."""
    known = bounded(json.loads(JsonSchema(schema).schema))
    given = known.get("x-guidance")
    known["x-guidance"] = _LAYOUT | (given if isinstance(given, dict) else {})
    return "%json " + json.dumps(known, ensure_ascii=False)


def quoted(text: str) -> str:
    """Return a text as a part of a grammar."""
    return json.dumps(text, ensure_ascii=False) if text else ""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a sequence: one of the fixed `texts`, or the grammar text that `write` returns. The argument of `write`
    says whether the part ends the whole output. A part without `texts` and `write` is free text."""

    where: str
    texts: tuple[str, ...] = ()
    write: Callable[[bool], str] | None = None

    @property
    def is_free(self) -> bool:
        return not self.texts and self.write is None


@dataclass(slots=True)
class _Rules:
    """The grammar rules that the translation has written so far."""

    lines: list[str] = field(default_factory=list)
    depth: int = 0

    def add(self, body: str, attributes: str = "") -> str:
        """Add a rule. Returns its name."""
        name = f"part_{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def sequence(self, parts: list[_Part], *, is_end: bool) -> str:
        """Return the parts in order, as the right side of a grammar rule. `is_end` says whether these parts end the
        whole output."""
        parts = [part for part in parts if part.texts != ("",)]
        words: list[str] = []
        position = 0
        while position < len(parts):
            part, is_last = parts[position], position == len(parts) - 1
            position += 1
            if part.is_free and not (is_last and is_end):
                words.append(self._free_until(part, None if is_last else parts[position]))
                position += 1
            elif part.is_free:
                words.append("ANY")
            else:
                words.append(_one_of(part.texts) if part.write is None else part.write(is_end and is_last))
        return " ".join(filter(None, words))

    def _free_until(self, part: _Part, marker: _Part | None) -> str:
        if marker is None or not marker.texts or "" in marker.texts:
            raise InvalidRequest(f"{part.where} is free text; only a fixed text may follow it", PARAM)
        return self.add(f"ANY {_one_of(marker.texts)}", "[lazy]")

    def parts(self, form: Any, where: str) -> list[_Part]:
        """Return the parts of a format, in order of the text."""
        if not isinstance(form, Mapping):
            raise InvalidRequest(f"{where} is {short_repr(form)}; must be an object", PARAM)
        kind = form.get("type")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise UnsupportedFeature(
                f"{where}.type is {short_repr(kind)}; this server takes {', '.join(_KINDS)}", PARAM
            )
        read, known = _KINDS[kind]
        for name, value in form.items():
            if name not in ("type", *known) and value not in (None, False, [], "json"):
                raise UnsupportedFeature(
                    f"{where} has {short_repr(name)}; {kind} takes {', '.join(known) or 'none'}", PARAM
                )
        if self.depth >= limits.MAX_NESTING:
            raise InvalidRequest(f"{where} nests more than {limits.MAX_NESTING} formats", PARAM)
        self.depth += 1
        try:
            return read(self, form, where)
        finally:
            self.depth -= 1

    def tag(self, form: Any, where: str, skipped: str = "") -> list[_Part]:
        """Return the beginning, the content and the end of a tag. The beginning lacks its first part `skipped`."""
        if not isinstance(form, Mapping):
            raise InvalidRequest(f"{where} is {short_repr(form)}; must be an object", PARAM)
        begin, ends = form.get("begin"), form.get("end", "")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(begin, str) or not isinstance(ends, list) or not all(isinstance(each, str) for each in ends):
            raise InvalidRequest(f"{where} needs 'begin' (a text) and 'end' (a text or a list of texts)", PARAM)
        check_count(len(ends), limits.MAX_PARTS, f"{where}.end", "texts")
        content = self.parts(form.get("content"), f"{where}.content")
        return [_Part(where, (begin[len(skipped) :],)), *content, _Part(where, tuple(ends))]


def _one_of(texts: tuple[str, ...]) -> str:
    return json.dumps(texts[0], ensure_ascii=False) if len(texts) == 1 else f"({' | '.join(map(json.dumps, texts))})"


def _list(form: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = form.get(name)
    if not isinstance(value, list):
        raise InvalidRequest(f"{where}.{name} is {short_repr(value)}; must be a list", PARAM)
    check_count(len(value), limits.MAX_PARTS, f"{where}.{name}", "entries")
    return value


def _text(form: Mapping[str, Any], name: str, where: str) -> str:
    value = form.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} is {short_repr(value)}; must be a text", PARAM)
    return value


# -- kinds -------------------------------------------------------------------------------------------------


def _constant(rules: _Rules, form: Mapping[str, Any], where: str) -> list[_Part]:
    return [_Part(where, (_text(form, "value", where),))]


def _schema(rules: _Rules, form: Mapping[str, Any], where: str) -> list[_Part]:
    name = rules.add(json_part(form.get("json_schema")))
    return [_Part(where, write=lambda is_end: name)]


def _regex(rules: _Rules, form: Mapping[str, Any], where: str) -> list[_Part]:
    from llguidance import regex_to_lark

    pattern = Regex(_text(form, "pattern", where)).pattern
    name = rules.add("%lark {\nstart: /" + regex_to_lark(pattern, "d") + "/\n}") if pattern else ""
    return [_Part(where, write=lambda is_end: name)]


def _grammar(rules: _Rules, form: Mapping[str, Any], where: str) -> list[_Part]:
    text = Lark(_text(form, "grammar", where)).grammar
    name = rules.add("%lark {\n" + (gbnf_to_lark(text) if is_gbnf(text) else text) + "\n}")
    return [_Part(where, write=lambda is_end: name)]


def _free(rules: _Rules, form: Mapping[str, Any], where: str) -> list[_Part]:
    return [_Part(where)]


def _sequence(rules: _Rules, form: Mapping[str, Any], where: str) -> list[_Part]:
    elements = _list(form, "elements", where)
    return [part for i, each in enumerate(elements) for part in rules.parts(each, f"{where}.elements[{i}]")]


def _either(rules: _Rules, form: Mapping[str, Any], where: str) -> list[_Part]:
    ways = [rules.parts(each, f"{where}.elements[{i}]") for i, each in enumerate(_list(form, "elements", where))]
    return [_Part(where, write=lambda is_end: _alternatives(rules, ways, is_end))]


def _tag(rules: _Rules, form: Mapping[str, Any], where: str) -> list[_Part]:
    return rules.tag(form, where)


def _triggered(rules: _Rules, form: Mapping[str, Any], where: str) -> list[_Part]:
    triggers = _list(form, "triggers", where)
    if not all(isinstance(each, str) and each for each in triggers):
        raise InvalidRequest(f"{where}.triggers must hold texts that are not empty", PARAM)
    bodies: dict[str, list[list[_Part]]] = {}
    for i, tag in enumerate(_list(form, "tags", where)):
        begin = tag.get("begin") if isinstance(tag, Mapping) else None
        found = max(filter(str(begin).startswith, triggers), key=len, default=None)
        if isinstance(begin, str) and found is None:
            raise InvalidRequest(f"{where}.tags[{i}] begins with {short_repr(begin)}, which no trigger begins", PARAM)
        bodies.setdefault(found or "", []).append(rules.tag(tag, f"{where}.tags[{i}]", found or ""))

    def write(is_end: bool) -> str:
        if not is_end:
            raise InvalidRequest(f"{where} has free text after its tags, so no format may follow", PARAM)
        return _with_triggers(rules, bodies, bool(form.get("at_least_one")), bool(form.get("stop_after_first")))

    return [_Part(where, write=write)]


def _with_triggers(rules: _Rules, bodies: Mapping[str, list[list[_Part]]], needs_one: bool, is_last: bool) -> str:
    """Return a grammar rule for free text in which a trigger begins a tag."""
    heads = [(rules.add(f"ANY {quoted(trigger)}", "[lazy]"), ways) for trigger, ways in bodies.items()]
    tag = rules.add(" | ".join(f"{head} {_alternatives(rules, ways, is_end=False)}" for head, ways in heads))
    if is_last:
        return tag if needs_one else f"({tag} | ANY)"
    return f"{tag}{'+' if needs_one else '*'} ANY"


def _separated(rules: _Rules, form: Mapping[str, Any], where: str) -> list[_Part]:
    ways = [rules.tag(tag, f"{where}.tags[{i}]") for i, tag in enumerate(_list(form, "tags", where))]
    separator = quoted(_text(form, "separator", where))

    def write(is_end: bool) -> str:
        tag = rules.add(_alternatives(rules, ways, is_end=False))
        more = "" if form.get("stop_after_first") else f" ({separator} {tag})*"
        return f"({tag}{more})" if form.get("at_least_one") else f"({tag}{more})?"

    return [_Part(where, write=write)]


def _alternatives(rules: _Rules, ways: list[list[_Part]], is_end: bool) -> str:
    return f"({' | '.join(rules.sequence(way, is_end=is_end) or _NOTHING for way in ways)})"


_Reader = Callable[[_Rules, Mapping[str, Any], str], list[_Part]]
#: For each kind: its reader, and its fields.
_KINDS: Mapping[str, tuple[_Reader, tuple[str, ...]]] = {
    "const_string": (_constant, ("value",)),
    "json_schema": (_schema, ("json_schema",)),
    "regex": (_regex, ("pattern",)),
    "grammar": (_grammar, ("grammar",)),
    "any_text": (_free, ()),
    "sequence": (_sequence, ("elements",)),
    "or": (_either, ("elements",)),
    "tag": (_tag, ("begin", "content", "end")),
    "triggered_tags": (_triggered, ("triggers", "tags", "at_least_one", "stop_after_first")),
    "tags_with_separator": (_separated, ("tags", "separator", "at_least_one", "stop_after_first")),
}
