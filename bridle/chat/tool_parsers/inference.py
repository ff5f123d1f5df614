"""Infers from a chat template how a model writes tool calls.

The template is rendered with probes (`probes.py`): one call, two calls, no arguments, an argument of each type. Two
renderings are compared. Their common and differing parts are the section, call, separator and arguments. The result is
tested on harder calls. A format that cannot parse the template's own text is not used.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from bridle.chat.stream_deltas import CallRules, ParsedMessage
from bridle.chat.tool_parsers import call_format as cf
from bridle.chat.tool_parsers.call_reader import CallFormatReader
from bridle.chat.tool_parsers.probe_texts import STRINGS, VALUES, calls_text
from bridle.chat.tool_parsers.text_alignment import common_prefix, common_suffix, trimmed_opening, whole_tags
from bridle.tokenizer import template_probes as tp

_FIELD = re.compile(r"(\{(?:name|id|index|arguments|key|value)\})")


def infer_format(render: tp.RenderChat, ends: tuple[str, ...] = ()) -> cf.CallFormat | None:
    """Return the format of a template's calls; None if the template writes no calls, or if its format cannot be
    inferred. `ends` are the texts of tokens that end an output."""
    prober = tp.prober_of(render)
    if prober is None:
        return None
    probes = _probe(prober, ends)
    form = None if probes is None else _infer(prober, probes, ends)
    return None if form is None else _tried(prober, form, ends)


def _tried(prober: tp.Prober, form: cf.CallFormat, ends: tuple[str, ...]) -> cf.CallFormat | None:
    """Return the format, if it parses the template's text for every type of argument; else None. If the template writes
    further calls differently, `max_calls` is the number of calls that are parsed. Formats with Python arguments are not
    tested, because templates omit quotes or commas that the models write."""
    if isinstance(form.arguments, cf.PythonArguments):
        return form
    full = [tp.ProbeCall(0, dict(zip(_MANY_KEYS, tp.SAMPLES.values(), strict=True)))]
    if not _reads(form, calls_text(prober, full, ends), full):
        return None
    for count in (3, 2, 1):
        calls = [tp.ProbeCall(number, STRINGS) for number in range(count)]
        text = calls_text(prober, calls, ends)
        if text is not None and _reads(form, text, calls):
            return form if count == 3 or form.max_calls else replace(form, max_calls=count)
    return None


_MANY_KEYS = ("zkeya", "zkeyb", "zkeyc", "zkeyd", "zkeye", "zkeyf")
_TYPED = {"properties": {key: {"type": kind} for key, kind in zip(_MANY_KEYS, tp.SAMPLES, strict=True)}}
_SCHEMAS = dict.fromkeys(tp.NAMES, _TYPED)


def _reads(form: cf.CallFormat, text: str | None, calls: list[tp.ProbeCall]) -> bool:
    rules = CallRules(
        frozenset(tp.NAMES), is_held=True, schemas=_SCHEMAS if set(calls[0].arguments) == set(_MANY_KEYS) else {}
    )
    found = ParsedMessage().add(CallFormatReader(form, rules).push(text or "", is_last=True))
    read = [(call.name, json.loads(call.arguments)) for call in found.calls if call.arguments.endswith("}")]
    return read == [(tp.NAMES[call.number], dict(call.arguments)) for call in calls]


@dataclass(frozen=True, slots=True)
class _Probes:
    """Texts of calls: `one` is a call with two strings, `two` are calls of different functions (None if refused), and
    `none` is a call without arguments."""

    one: str
    two: str | None
    none: str | None


def _probe(prober: tp.Prober, ends: tuple[str, ...]) -> _Probes | None:
    first, second = tp.ProbeCall(0, STRINGS), tp.ProbeCall(1, STRINGS)
    one = calls_text(prober, [first], ends)
    if one is None:
        return None
    two = calls_text(prober, [first, second], ends)
    if two is not None and tp.NAMES[1] not in two:
        two = None  # the template drops calls after the first
    return _Probes(one, two, calls_text(prober, [tp.ProbeCall(0, {})], ends))


# -- parts of a call -----------------------------------------------------------------------------------------


def _infer(prober: tp.Prober, probes: _Probes, ends: tuple[str, ...]) -> cf.CallFormat | None:
    found = _json_parts(probes.one, tp.NAMES[0], 0) or _other_parts(prober, probes, ends)
    if found is None:
        return None
    form = _as_json_object(_with_neighbours(*found, probes))
    if form.trigger or form.is_bare:
        return form
    if isinstance(form.arguments, cf.PythonArguments) and form.section_open.strip() == "[":
        return replace(form, is_bare=True)
    return _prompted(prober, form)


def _prompted(prober: tp.Prober, form: cf.CallFormat) -> cf.CallFormat | None:
    """Return the format of calls whose separator also ends the prompt."""
    mark = form.separator.strip()
    if not mark or not (prober.generation_prompt() or "").endswith(mark):
        return None
    before = (prober.turn(content=tp.CONTENT) or "").partition(tp.CONTENT)[0]
    plain = before[before.rfind(mark) :] if mark in before else ""
    return replace(form, call=(mark, *form.call), separator="", is_prompted=True, content_open=plain)


Parts = tuple[str, ...]


def _json_parts(text: str, name: str, number: int) -> tuple[Parts, cf.JsonArguments] | None:
    """Return the call as literals and fields, if its arguments are JSON; else None."""
    for start in (at for at, char in enumerate(text) if char in '{"'):
        for value, end in _json_values(text, start):
            if value == STRINGS:
                whole = text[:start] + cf.ARGUMENTS + text[end:]
                return _split(whole, name, number), cf.JsonArguments(is_text=text[start] == '"')
    return None


def _json_values(text: str, start: int) -> list[tuple[Any, int]]:
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
        return [(json.loads(value) if isinstance(value, str) else value, end)]
    except (ValueError, RecursionError):
        return []


def _split(text: str, name: str, number: int) -> Parts:
    """Return a text as a list of literals and fields, with fields instead of the name and the id."""
    text = text.replace(name, cf.NAME).replace(tp.IDS[number], cf.ID)
    return tuple(part for part in _FIELD.split(text) if part)


def _with_neighbours(pattern: Parts, arguments: cf.Arguments, probes: _Probes) -> cf.CallFormat:
    """Return the format, with the text around and between several calls."""
    if probes.two is None:
        return cf.CallFormat(pattern, arguments, max_calls=1)
    second = probes.two
    first_end = _end_of_arguments(second, second.index(tp.NAMES[0]), arguments)
    begin, end = pattern[0] if pattern[0] not in cf.FIELDS else "", pattern[-1] if pattern[-1] not in cf.FIELDS else ""
    next_name = second.index(tp.NAMES[1], first_end)
    between = second[first_end:next_name]
    pattern, between = _with_index(pattern, second, between, tp.IDS[1])
    begin = pattern[0] if pattern[0] not in cf.FIELDS else ""
    if pattern[1:2] and pattern[0] != cf.NAME and pattern[1] in (cf.ID, cf.INDEX):
        return _with_leading_id(pattern, arguments, between, begin, end)
    between = _behind_fields(pattern, between.replace(tp.IDS[0], cf.ID))
    opening = trimmed_opening(common_suffix(begin, between))
    rest = between[: len(between) - len(opening)]
    closing = common_prefix(end, rest)
    closing, rest = whole_tags(closing, end, rest)
    separator = rest[len(closing) :]
    section_open = begin[: len(begin) - len(opening)]
    section_close = end[len(closing) :] if section_open else ""  # else the text ends the turn
    inner = tuple(part for part in (opening, *_inner(pattern, begin, end), closing) if part)
    return cf.CallFormat(inner, arguments, section_open, section_close, separator)


def _behind_fields(pattern: Parts, between: str) -> str:
    """Return the text between two calls, without the fields that follow the first call's arguments."""
    for part in pattern[pattern.index(cf.ARGUMENTS) + 1 : -1]:
        between = between.removeprefix(part)
    return between


def _inner(pattern: Parts, begin: str, end: str) -> Parts:
    """Return the pattern without its first and last literals."""
    return pattern[bool(begin) : len(pattern) - bool(end)]


def _with_index(pattern: Parts, second: str, between: str, next_id: str) -> tuple[Parts, str]:
    """Return the pattern with a field for the number of each call, and the text between calls with the same fields."""
    between = between.replace(next_id, cf.ID)
    behind = second[second.index(tp.NAMES[1]) + len(tp.NAMES[1]) :]
    made: list[str] = []
    for place, part in enumerate(pattern):
        if part in cf.FIELDS:
            made.append(part)
        elif place > 0 and pattern[place - 1] == cf.NAME and (split := _numbered(part, behind)):
            made += split
        elif place == 0 and (split := _numbered_before(part, between)):
            made += split
            between = between[: len(between) - len(split[2]) - 1] + cf.INDEX + split[2]
        else:
            made.append(part)
    return tuple(part for part in made if part), between


def _numbered(part: str, behind: str) -> list[str] | None:
    """Split a literal at its number, if the second call's literal differs only in that number; else return None."""
    for found in re.finditer(r"\d+", part):
        other = part[: found.start()] + str(int(found[0]) + 1) + part[found.end() :]
        if not behind.startswith(part) and behind.startswith(other):
            return [part[: found.start()], cf.INDEX, part[found.end() :]]
    return None


def _numbered_before(part: str, between: str) -> list[str] | None:
    """Split the literal before the name at its number, if the second call's literal differs only in that number."""
    for found in re.finditer(r"\d+", part):
        after = part[found.end() :]
        if between.endswith(str(int(found[0]) + 1) + after) and not between.endswith(found[0] + after):
            return [part[: found.start()], cf.INDEX, after]
    return None


def _with_leading_id(pattern: Parts, arguments: cf.Arguments, between: str, begin: str, end: str) -> cf.CallFormat:
    """Return the format of calls in which an id or a number precedes the name."""
    field = pattern[1]
    before = between.partition(field)[0]
    opening = trimmed_opening(common_suffix(begin, before))
    rest = before[: len(before) - len(opening)]
    closing, rest = whole_tags(common_prefix(end, rest), end, rest)
    inner = tuple(part for part in (opening, *_inner(pattern, begin, end), closing) if part)
    return cf.CallFormat(
        inner, arguments, begin[: len(begin) - len(opening)], end[len(closing) :], rest[len(closing) :]
    )


def _end_of_arguments(text: str, start: int, arguments: cf.Arguments) -> int:
    """Return the end of the arguments of the call at `start`."""
    if isinstance(arguments, cf.JsonArguments):
        for at in range(start, len(text)):
            if text[at] in '{"':
                for value, end in _json_values(text, at):
                    if value == STRINGS:
                        return end
    last = text.index(VALUES[1], start) + len(VALUES[1])
    match arguments:
        case cf.TaggedArguments():
            return last + len(arguments.closing.replace(cf.KEY, tp.KEYS[1]))
        case cf.PythonArguments():
            return last + (text[last] in "'\"")  # some templates write strings without quotes
        case cf.QuotedArguments():
            return last + len(arguments.quote)
    return last


# -- arguments that are not JSON -----------------------------------------------------------------------------


def _other_parts(prober: tp.Prober, probes: _Probes, ends: tuple[str, ...]) -> tuple[Parts, cf.Arguments] | None:
    text = probes.one
    if not all(each in text for each in (*tp.KEYS, *VALUES)):
        return None
    head, _, rest = text.partition(tp.KEYS[0])
    head_end = max(head.rfind(tp.NAMES[0]) + len(tp.NAMES[0]), 0)
    middle, _, rest = rest.partition(VALUES[0])
    between, _, tail = rest.partition(tp.KEYS[1])
    tail = tail.partition(VALUES[1])[2]
    if middle in ("=", "='", '="') and head.endswith("("):
        whole = head + cf.ARGUMENTS + tail[len(middle) - 1 :]
        return _split(whole, tp.NAMES[0], 0), cf.PythonArguments()
    middles = _middles(prober, ends)
    if middle.startswith(":") and len(middle) > 1 and middles.get("integer") in (":", middle):
        quote = middle[1:]
        return _split(head + cf.ARGUMENTS + tail[len(quote) :], tp.NAMES[0], 0), cf.QuotedArguments(quote)
    return _tagged_parts(head, head_end, middle, between, tail, middles)


def _tagged_parts(
    head: str, head_end: int, middle: str, between: str, tail: str, middles: dict[str, str]
) -> tuple[Parts, cf.Arguments] | None:
    between = between.replace(tp.KEYS[0], cf.KEY)
    tail = tail.replace(tp.KEYS[1], cf.KEY)
    opening = trimmed_opening(common_suffix(head[head_end:], between))
    rest = between[: len(between) - len(opening)]
    closing, rest = whole_tags(common_prefix(tail, rest), tail, rest)
    if not opening.strip() or not closing.strip():
        return None
    is_nested = middles.pop("nested", "") == "nested"
    literals = middles.pop("literals", "json")
    others = {text for name, text in middles.items() if name != "string"}
    if others <= {middle}:
        middles = {"any": middle}
    elif len(others) == 1:
        middles = {"string": middle, "any": others.pop()}
    else:
        middles = {"string": middle, **middles}
    arguments = cf.TaggedArguments(opening, middles, closing, rest[len(closing) :], is_nested, literals)
    whole = head[: len(head) - len(opening)] + cf.ARGUMENTS + tail[len(closing) :]
    return _split(whole, tp.NAMES[0], 0), arguments


def _middles(prober: tp.Prober, ends: tuple[str, ...]) -> dict[str, str]:
    """Return the text between key and value, by the type of the value."""
    found: dict[str, str] = {}
    for name, sample in tp.SAMPLES.items():
        text = calls_text(prober, [tp.ProbeCall(0, {tp.KEYS[0]: sample})], ends) or ""
        behind = text.partition(tp.KEYS[0])[2]
        spelled = [json.dumps(sample), str(sample), json.dumps(sample, separators=(",", ":"))]
        places = [behind.find(each) for each in spelled if each in behind]
        if places and name != "string":
            found[name] = behind[: min(places)]
        if "True" in behind and name == "boolean":
            found["literals"] = "mixed"
        if "{'zinner': 'zvalc'}" in behind or "['zvald']" in behind:
            found["literals"] = "python"
        elif name in ("object", "array") and not places and ("zvalc" in behind or "zvald" in behind):
            found["nested"] = "nested"
    return found


# -- texts ---------------------------------------------------------------------------------------------------


def _as_json_object(form: cf.CallFormat) -> cf.CallFormat:
    """Return the format, marked as JSON objects if its calls are JSON objects."""
    if not isinstance(form.arguments, cf.JsonArguments):
        return form
    text = "".join(
        {cf.NAME: "zname", cf.ID: "zid", cf.INDEX: "0", cf.ARGUMENTS: '{"zarguments": 0}'}.get(p, p) for p in form.call
    )
    start = text.find("{")
    try:
        value, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return form
    if not isinstance(value, dict) or start < 0:
        return form
    name_key = next((key for key, each in value.items() if each == "zname"), None)
    inner = {"zarguments": 0}
    arguments_key = next((key for key, each in value.items() if each in (inner, json.dumps(inner))), None)
    if arguments_key is None or (name_key is None and arguments_key != "zname"):
        return form
    is_bare = not (form.section_open + text[:start]).strip("[ \n")
    keys = {"name_key": name_key or "", "arguments_key": arguments_key if name_key else ""}
    return replace(form, **keys, is_bare=is_bare)
