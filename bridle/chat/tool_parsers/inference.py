"""Infers from a chat template how a model writes tool calls.

The template is rendered with probes (`probes.py`): one call, two calls, no arguments, an argument of each type. The
parts that two renderings share, and those in which they differ, tell section, call, separator and arguments apart. The
result is tried on harder calls before it is used; a format that does not read what the template writes is not used.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from bridle.chat.tool_parsers.call_format import (
    ARGUMENTS,
    FIELDS,
    ID,
    INDEX,
    KEY,
    NAME,
    Arguments,
    CallFormat,
    JsonArguments,
    PythonArguments,
    QuotedArguments,
    TaggedArguments,
)
from bridle.chat.tool_parsers.probes import CONTENT, IDS, KEYS, NAMES, SAMPLES, ProbeCall, Prober, RenderChat, prober_of

_VALUES = ("zvala", "zvalb")
#: The shortest text that is taken for the beginning of a turn, and the shortest tag that is taken for its mark.
_MIN_HEAD, _MIN_MARK = 8, 8
_STRINGS = dict(zip(KEYS, _VALUES, strict=True))
_FIELD = re.compile(r"(\{(?:name|id|index|arguments|key|value)\})")
_END_MARK = re.compile(r"<[^<>\s]*(?:end|eot|eos|eom|im_|return|role_end|message_sep|SPECIAL_12)[^<>]*>|\[e~\[|</s>")


def infer_format(render: RenderChat, ends: tuple[str, ...] = ()) -> CallFormat | None:
    """The format of a template's calls; None if it writes none, or in a way that is not understood. `ends` are the
    texts of tokens that end an output."""
    prober = prober_of(render)
    if prober is None:
        return None
    probes = _probe(prober, ends)
    return None if probes is None else _infer(prober, probes, ends)


@dataclass(frozen=True, slots=True)
class _Probes:
    """Texts of calls: `one` call with two strings, `two` calls of different functions (None if refused), and `none`, a
    call without arguments."""

    one: str
    two: str | None
    none: str | None


def _probe(prober: Prober, ends: tuple[str, ...]) -> _Probes | None:
    first, second = ProbeCall(0, _STRINGS), ProbeCall(1, _STRINGS)
    one = _calls_text(prober, [first], ends)
    if one is None:
        return None
    two = _calls_text(prober, [first, second], ends)
    if two is not None and NAMES[1] not in two:
        two = None  # the template drops further calls
    return _Probes(one, two, _calls_text(prober, [ProbeCall(0, {})], ends))


def _calls_text(prober: Prober, calls: list[ProbeCall], ends: tuple[str, ...]) -> str | None:
    """The text of calls alone: without the beginning of the turn, and without its end."""
    text = prober.turn(calls)
    if text is None or NAMES[calls[0].number] not in text:
        return None
    text = text[_start_of_calls(prober, calls, text) :].lstrip()
    behind = max(text.rfind(each) + len(each) for each in (*_VALUES, *KEYS, NAMES[calls[-1].number]) if each in text)
    marks = re.findall(r"<[^<>\s]+>", _turn_head(prober))[:2]
    marks = [each for each in marks if len(each) > _MIN_MARK and each not in text[:behind]]
    cut = _end_of_turn(text[behind:], _ordinary_end(prober), (*ends, *marks))
    return text[: behind + cut].rstrip()


def _start_of_calls(prober: Prober, calls: list[ProbeCall], text: str) -> int:
    """Where calls begin: behind what every turn begins with, with or without content and thoughts."""
    limit = text.index(NAMES[calls[0].number])
    begin = max((text.rfind(head, 0, limit) + len(head) for head in _heads(prober) if head in text[:limit]), default=0)
    for ordinary in (prober.generation_prompt(), prober.turn(content=CONTENT)):
        head = "" if ordinary is None else ordinary.partition(CONTENT)[0].rstrip()
        if head and text.startswith(head):
            begin = max(begin, len(head))
    beside = prober.turn(calls, content=CONTENT)
    if beside is not None and CONTENT in beside:
        before = beside.partition(CONTENT)[2].partition(NAMES[calls[0].number])
        shared = _common_suffix(before[0], text[:limit]) if before[1] else ""
        begin = max(begin, limit - len(shared)) if shared else begin
    return min(begin, limit)


def _heads(prober: Prober) -> list[str]:
    """Texts that begin a turn of the assistant, with more or less of what ends the user's."""
    shared = _turn_head(prober)
    tags = [found.start() for found in re.finditer("<", shared) if len(shared) - found.start() >= len(shared) / 2]
    heads = [shared[start:] for start in tags] if len(shared) > _MIN_HEAD else []
    return heads + [plain for head in heads if len(plain := _THOUGHT_TAG.sub("", head)) > _MIN_HEAD]


#: A tag that begins thoughts, at the end of a prompt.
_THOUGHT_TAG = re.compile(r"<[^<>]*(?:think|reason|thought)[^<>]*>\s*\Z", re.IGNORECASE)


def _turn_head(prober: Prober) -> str:
    """What every turn of the assistant begins with, as whole tags."""
    shared = _common_prefix(prober.generation_prompt() or "", prober.turn(content=CONTENT) or "")
    cut = shared.rfind("<")
    return shared[:cut] if cut > 0 and ">" not in shared[cut:] else shared


def _ordinary_end(prober: Prober) -> str:
    """What the template writes behind the content of a turn without calls."""
    text = prober.turn(content=CONTENT)
    return text.rpartition(CONTENT)[2] if text and CONTENT in text else ""


def _end_of_turn(tail: str, ordinary: str, ends: tuple[str, ...]) -> int:
    """Where in `tail`, the text behind the last argument, the calls are over and the turn's end begins."""
    places = [tail.find(each) for each in (*ends, ordinary.strip()) if each and each in tail]
    if not places and (found := _END_MARK.search(tail)) and not _closes_calls(found[0]):
        places.append(found.start())
    return min(places, default=len(tail))


def _closes_calls(mark: str) -> bool:
    return any(word in mark.lower() for word in ("call", "tool", "action", "invoke", "param"))


# -- parts of a call -----------------------------------------------------------------------------------------


def _infer(prober: Prober, probes: _Probes, ends: tuple[str, ...]) -> CallFormat | None:
    found = _json_parts(probes.one, NAMES[0], 0) or _other_parts(prober, probes, ends)
    if found is None:
        return None
    pattern, arguments = found
    if isinstance(arguments, JsonArguments):
        form = _with_neighbours(pattern, arguments, probes)
    else:
        form = _with_neighbours(pattern, arguments, probes, _STRINGS)
    return _as_json_object(form)


Parts = tuple[str, ...]


def _json_parts(text: str, name: str, number: int) -> tuple[Parts, JsonArguments] | None:
    """The call as literals and fields, if its arguments are JSON."""
    for start in (at for at, char in enumerate(text) if char in '{"'):
        for value, end in _json_values(text, start):
            if value == _STRINGS:
                whole = text[:start] + ARGUMENTS + text[end:]
                return _split(whole, name, number), JsonArguments(is_text=text[start] == '"')
    return None


def _json_values(text: str, start: int) -> list[tuple[Any, int]]:
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
        return [(json.loads(value) if isinstance(value, str) else value, end)]
    except (ValueError, RecursionError):
        return []


def _split(text: str, name: str, number: int) -> Parts:
    """A text with fields in place of name and id, as a list of literals and fields."""
    text = text.replace(name, NAME).replace(IDS[number], ID)
    return tuple(part for part in _FIELD.split(text) if part)


def _with_neighbours(
    pattern: Parts, arguments: Arguments, probes: _Probes, strings: dict[str, str] | None = None
) -> CallFormat:
    """The format, with what surrounds and separates several calls."""
    if probes.two is None:
        return CallFormat(pattern, arguments, max_calls=1)
    second = probes.two
    first_end = _end_of_arguments(second, second.index(NAMES[0]), arguments)
    begin, end = pattern[0] if pattern[0] not in FIELDS else "", pattern[-1] if pattern[-1] not in FIELDS else ""
    next_name = second.index(NAMES[1], first_end)
    between = second[first_end:next_name]
    pattern, between = _with_index(pattern, second, between, IDS[1])
    begin = pattern[0] if pattern[0] not in FIELDS else ""
    if pattern[1:2] and pattern[0] != NAME and pattern[1] in (ID, INDEX):
        return _with_leading_id(pattern, arguments, between, begin, end)
    between = _behind_fields(pattern, between.replace(IDS[0], ID))
    opening = _trimmed_opening(_common_suffix(begin, between))
    rest = between[: len(between) - len(opening)]
    closing = _common_prefix(end, rest)
    closing, rest = _whole_tags(closing, end, rest)
    separator = rest[len(closing) :]
    section_open = begin[: len(begin) - len(opening)]
    section_close = end[len(closing) :] if section_open else ""  # else it ends the turn
    inner = tuple(part for part in (opening, *_inner(pattern, begin, end), closing) if part)
    return CallFormat(inner, arguments, section_open, section_close, separator)


def _behind_fields(pattern: Parts, between: str) -> str:
    """The text between two calls, without the fields that follow the first one's arguments."""
    for part in pattern[pattern.index(ARGUMENTS) + 1 : -1]:
        between = between.removeprefix(part)
    return between


def _inner(pattern: Parts, begin: str, end: str) -> Parts:
    """The pattern without its outer literals."""
    return pattern[bool(begin) : len(pattern) - bool(end)]


def _with_index(pattern: Parts, second: str, between: str, next_id: str) -> tuple[Parts, str]:
    """The pattern with a field where calls are numbered, and the text between calls with fields likewise."""
    between = between.replace(next_id, ID)
    behind = second[second.index(NAMES[1]) + len(NAMES[1]) :]
    made: list[str] = []
    for place, part in enumerate(pattern):
        if part in FIELDS:
            made.append(part)
        elif place > 0 and pattern[place - 1] == NAME and (split := _numbered(part, behind)):
            made += split
        elif place == 0 and (split := _numbered_before(part, between)):
            made += split
            between = between[: len(between) - len(split[2]) - 1] + INDEX + split[2]
        else:
            made.append(part)
    return tuple(part for part in made if part), between


def _numbered(part: str, behind: str) -> list[str] | None:
    """A literal that differs from the second call's only in a number."""
    for found in re.finditer(r"\d+", part):
        other = part[: found.start()] + str(int(found[0]) + 1) + part[found.end() :]
        if not behind.startswith(part) and behind.startswith(other):
            return [part[: found.start()], INDEX, part[found.end() :]]
    return None


def _numbered_before(part: str, between: str) -> list[str] | None:
    """The same for the literal in front of the name."""
    for found in re.finditer(r"\d+", part):
        after = part[found.end() :]
        if between.endswith(str(int(found[0]) + 1) + after) and not between.endswith(found[0] + after):
            return [part[: found.start()], INDEX, after]
    return None


def _with_leading_id(pattern: Parts, arguments: Arguments, between: str, begin: str, end: str) -> CallFormat:
    """The format of calls in which an id or a number comes before the name."""
    field = pattern[1]
    before = between.partition(field)[0]
    opening = _trimmed_opening(_common_suffix(begin, before))
    rest = before[: len(before) - len(opening)]
    closing, rest = _whole_tags(_common_prefix(end, rest), end, rest)
    inner = tuple(part for part in (opening, *_inner(pattern, begin, end), closing) if part)
    return CallFormat(inner, arguments, begin[: len(begin) - len(opening)], end[len(closing) :], rest[len(closing) :])


def _end_of_arguments(text: str, start: int, arguments: Arguments) -> int:
    """Where the arguments of the call at `start` end."""
    if isinstance(arguments, JsonArguments):
        for at in range(start, len(text)):
            if text[at] in '{"':
                for value, end in _json_values(text, at):
                    if value == _STRINGS:
                        return end
    last = text.index(_VALUES[1], start) + len(_VALUES[1])
    match arguments:
        case TaggedArguments():
            return last + len(arguments.closing.replace(KEY, KEYS[1]))
        case PythonArguments():
            return last + 1
        case QuotedArguments():
            return last + len(arguments.quote)
    return last


# -- arguments that are not JSON -----------------------------------------------------------------------------


def _other_parts(prober: Prober, probes: _Probes, ends: tuple[str, ...]) -> tuple[Parts, Arguments] | None:
    text = probes.one
    if not all(each in text for each in (*KEYS, *_VALUES)):
        return None
    head, _, rest = text.partition(KEYS[0])
    head_end = max(head.rfind(NAMES[0]) + len(NAMES[0]), 0)
    middle, _, rest = rest.partition(_VALUES[0])
    between, _, tail = rest.partition(KEYS[1])
    tail = tail.partition(_VALUES[1])[2]
    if middle.startswith("=") and middle[1:] in ("'", '"') and head.endswith("("):
        whole = head + ARGUMENTS + tail[1:]
        return _split(whole, NAMES[0], 0), PythonArguments()
    middles = _middles(prober, ends)
    if middle.startswith(":") and len(middle) > 1 and middles.get("integer") == ":":
        quote = middle[1:]
        return _split(head + ARGUMENTS + tail[len(quote) :], NAMES[0], 0), QuotedArguments(quote)
    return _tagged_parts(head, head_end, middle, between, tail, middles)


def _tagged_parts(
    head: str, head_end: int, middle: str, between: str, tail: str, middles: dict[str, str]
) -> tuple[Parts, Arguments] | None:
    between = between.replace(KEYS[0], KEY)
    tail = tail.replace(KEYS[1], KEY)
    opening = _trimmed_opening(_common_suffix(head[head_end:], between))
    rest = between[: len(between) - len(opening)]
    closing, rest = _whole_tags(_common_prefix(tail, rest), tail, rest)
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
    arguments = TaggedArguments(opening, middles, closing, rest[len(closing) :], is_nested, literals)
    whole = head[: len(head) - len(opening)] + ARGUMENTS + tail[len(closing) :]
    return _split(whole, NAMES[0], 0), arguments


def _middles(prober: Prober, ends: tuple[str, ...]) -> dict[str, str]:
    """What stands between key and value, by the type of the value."""
    found: dict[str, str] = {}
    for name, sample in SAMPLES.items():
        text = _calls_text(prober, [ProbeCall(0, {KEYS[0]: sample})], ends) or ""
        behind = text.partition(KEYS[0])[2]
        spelled = [json.dumps(sample), str(sample), json.dumps(sample, separators=(",", ":"))]
        places = [behind.find(each) for each in spelled if each in behind]
        if places and name != "string":
            found[name] = behind[: min(places)]
        if "True" in behind and name == "boolean":
            found["literals"] = "mixed"
        if "{'zinner': 'zvalc'}" in behind:
            found["literals"] = "python"
        elif name in ("object", "array") and not places and ("zvalc" in behind or "zvald" in behind):
            found["nested"] = "nested"
    return found


# -- texts ---------------------------------------------------------------------------------------------------


def _as_json_object(form: CallFormat) -> CallFormat:
    """The format, marked as one whose calls are JSON objects if they are."""
    if not isinstance(form.arguments, JsonArguments):
        return form
    text = "".join({NAME: "zname", ID: "zid", INDEX: "0", ARGUMENTS: '{"zarguments": 0}'}.get(p, p) for p in form.call)
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
    form = replace_struct(form, name_key=name_key or "", arguments_key=arguments_key if name_key else "")
    return replace_struct(form, is_bare=is_bare)


def replace_struct(form: CallFormat, **changes: Any) -> CallFormat:
    """A copy with other fields."""
    fields = {name: getattr(form, name) for name in form.__struct_fields__}
    return CallFormat(**(fields | changes))


def _common_prefix(first: str, second: str) -> str:
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return first[:length]


def _common_suffix(first: str, second: str) -> str:
    return _common_prefix(first[::-1], second[::-1])[::-1]


def _trimmed_opening(text: str) -> str:
    """A common suffix without the end of the tag before it: `\\n<parameter=` of `>\\n<parameter=`."""
    cut = re.match(r"""[^<\[{\s\]]*[>)}"',]+(?=\s*(?:[<\[{]|\]<))""", text)
    return text[cut.end() :] if cut else text


def _whole_tags(closing: str, end: str, rest: str) -> tuple[str, str]:
    """A common prefix without half a tag at its end."""
    cut = closing.rfind("<")
    if cut >= 0 and ">" not in closing[cut:] and (len(closing) < len(end) and len(closing) < len(rest)):
        closing = closing[:cut]
    return closing, rest
