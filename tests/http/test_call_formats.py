"""The chat template decides the format of tool calls. Calls are parsed as the template writes them, and the format's
grammar accepts them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bridle.chat.stream_deltas import CallRules, ParsedMessage
from bridle.chat.tool_parsers import held_call
from bridle.chat.tool_parsers.call_format import CallFormat, TaggedArguments, parse_format, to_dict
from bridle.chat.tool_parsers.call_grammar import CallGrammar
from bridle.chat.tool_parsers.call_reader import CallFormatReader
from bridle.chat.tool_parsers.grammar import Form, Function
from bridle.chat.tool_parsers.inference import infer_format
from bridle.chat.tool_parsers.tagged_arguments import read_tagged
from bridle.errors import InvalidRequest
from bridle.structured_output.grammar import grammar_of
from bridle.structured_output.matcher import Matcher
from bridle.structured_output.vocabulary import GrammarVocabulary
from tests.chat.sampled_calls import CallSampler
from tests.fakes.call_templates import LOOSE_PYTHON, TEMPLATES, CallTemplate

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "kind": {"enum": ["day", "week end"]},
        "on": {"type": "boolean"},
        "where": {"type": "object", "properties": {"street": {"type": "string"}}},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
}
FUNCTIONS = [Function("get_weather", SCHEMA), Function("stop", {"type": "object", "properties": {}})]
RULES = CallRules(frozenset({"get_weather", "stop"}), True, {each.name: each.parameters for each in FUNCTIONS})
FULL = {"city": "Rome", "days": 3, "kind": "week end", "on": True, "where": {"street": "Via"}, "tags": ["a", "b"]}
Calls = list[tuple[str, Mapping[str, Any]]]


@cache
def form_of(name: str) -> CallFormat:
    form = infer_format(CallTemplate(TEMPLATES[name]).render, ("<|im_end|>",))
    assert form is not None
    return form


def read(form: CallFormat, pieces: list[str], rules: CallRules = RULES) -> tuple[str, list[tuple[str, Any]]]:
    """Return the content and the tool calls of a text that arrives in pieces."""
    reader, found = CallFormatReader(form, rules), ParsedMessage()
    for position, piece in enumerate(pieces):
        found.add(reader.push(piece, is_last=position == len(pieces) - 1))
    return found.content, [(call.name, json.loads(call.arguments)) for call in found.calls]


#: Texts that no format could take for its own markup.
texts = st.text(st.sampled_from('aZ é日"\\.,:;!?-_&()/'), max_size=12).map(str.strip)
arguments = st.fixed_dictionaries(
    {"city": texts},
    optional={
        "days": st.integers(-999, 999),
        "kind": st.sampled_from(["day", "week end"]),
        "on": st.booleans(),
        "where": st.fixed_dictionaries({"street": texts.filter(bool)}),
        "tags": st.lists(texts.filter(bool), min_size=1, max_size=3),
    },
)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", TEMPLATES)
@given(calls=st.lists(arguments, min_size=1, max_size=3), cuts=st.lists(st.integers(0, 500), max_size=8))
def test_calls_come_back_as_the_template_writes_them(name: str, calls: list[Any], cuts: list[int]) -> None:
    made: Calls = [("get_weather", each) for each in calls]
    if name in ("Python calls", "quoted strings", "Python's words", "Python's lists"):  # these have no escapes
        made = [(called, {**each, "city": re.sub(r"[\"'\\]", "", each["city"])}) for called, each in made]
        made = [(called, _without(each, "where", "tags")) for called, each in made]
    text = CallTemplate(TEMPLATES[name]).calls(made)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    content, found = read(form_of(name), pieces)
    assert (content.strip(), found) == ("", made)


def _without(value: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: each for key, each in value.items() if key not in keys}


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_type_comes_back_beside_content(name: str) -> None:
    text = CallTemplate(TEMPLATES[name]).calls([("get_weather", FULL), ("stop", {})], "Let me see.")
    for pieces in ([text], list(text)):
        content, found = read(form_of(name), pieces)
        assert (content.strip(), found) == ("Let me see.", [("get_weather", FULL), ("stop", {})])


@pytest.mark.parametrize("name", TEMPLATES)
def test_other_text_is_content(name: str) -> None:
    form = form_of(name)
    call = CallTemplate(TEMPLATES[name]).calls([("get_weather", {"city": "Rome"})])
    for text in (
        "plain",
        "a < b [1] {2}",
        f"{form.trigger} is how calls begin",
        call.replace("get_weather", "unknown"),
    ):
        for pieces in ([text], list(text)):
            content, found = read(form, pieces)
            assert (content.strip(), found) == (text.strip(), [])


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_format_is_plain_data(name: str) -> None:
    form = form_of(name)
    assert parse_format(msgspec.json.decode(msgspec.json.encode(to_dict(form)))) == form


@pytest.mark.parametrize("data", [{}, {"call": ["x"], "arguments": {"type": "json"}}, {"call": "x"}, 5])
def test_what_is_no_format_is_refused(data: object) -> None:
    with pytest.raises(InvalidRequest, match="tool_format"):
        parse_format(data)


# -- grammars ------------------------------------------------------------------------------------------------------


class Spelled:
    """A vocabulary of bytes and special tokens, and the grammars of a format for this vocabulary."""

    def __init__(self, form: CallFormat, has_tokens: bool) -> None:
        marks = {mark for text in form.literals() for mark in re.findall(r"<\|[^<>]*\|>|<[a-z_]+\|>", text)}
        self.specials = {mark: 257 + number for number, mark in enumerate(sorted(marks))} if has_tokens else {}
        tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *(mark.encode() for mark in self.specials)]
        special = [256, *self.specials.values()]
        self.vocabulary = GrammarVocabulary(tokens, [256], special, lambda text: list(text.encode()))
        grammar = CallGrammar(form, self.specials)
        self.must = self._matcher(grammar.must_call(FUNCTIONS, 3))
        self.may = self._matcher(grammar.may_call(FUNCTIONS))

    def _matcher(self, grammar: str) -> Matcher:
        return Matcher(self.vocabulary, grammar_of(Form(grammar, bool(self.specials)).constraint()))

    def encode(self, text: str) -> list[int]:
        if not self.specials:
            return list(text.encode())
        pieces = re.split("(" + "|".join(map(re.escape, self.specials)) + ")", text)
        return [token for piece in pieces for token in self._encode(piece)]

    def _encode(self, piece: str) -> list[int]:
        return [self.specials[piece]] if piece in self.specials else list(piece.encode())

    def passes(self, matcher: Matcher, text: str) -> bool:
        twin = matcher.copy()
        for token in self.encode(text):
            if not twin.mask()[token >> 3] >> (token & 7) & 1:
                return False
            twin.commit([token])
        return twin.is_accepting


@pytest.mark.few(12)
@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_grammar_accepts_what_the_template_writes(name: str, has_tokens: bool) -> None:
    template, spelled = CallTemplate(TEMPLATES[name]), Spelled(form_of(name), has_tokens)
    for calls in ([("get_weather", {"city": "Rome"})], [("get_weather", FULL)], [("get_weather", FULL), ("stop", {})]):
        text = template.calls(calls).strip()
        assert spelled.passes(spelled.must, text), text
        assert spelled.passes(spelled.may, "Let me see. " + text), text
    assert spelled.passes(spelled.may, "Just text: 1 < 2.")
    for wrong in (
        template.calls([("other", {"city": "Rome"})]),
        template.calls([("get_weather", {})]),
        template.calls([("get_weather", {**FULL, "days": "soon"})]),
        template.calls([("get_weather", {**FULL, "kind": "never"})]),
        template.calls([("stop", {})] * 4),
    ):
        assert not spelled.passes(spelled.must, wrong.strip()), wrong
    assert not spelled.passes(spelled.must, "Just text.")


@cache
def sampler_of(name: str) -> CallSampler:
    return CallSampler(form_of(name), FUNCTIONS)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", TEMPLATES)
@given(seed=st.integers(0, 1 << 20), cuts=st.lists(st.integers(0, 500), max_size=8))
def test_calls_that_the_grammar_allows_come_back(name: str, seed: int, cuts: list[int]) -> None:
    """Under the grammar, a model writes calls that match their schemas and that the template writes in the same way.
    Templates write calls in Python syntax without escapes."""
    text = sampler_of(name).sample(seed)
    assume(text is not None)
    assert text is not None
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    content, found = read(form_of(name), [text[start:end] for start, end in itertools.pairwise(bounds)])
    assert (content.strip(), bool(found)) == ("", True), text
    for called, arguments in found:
        jsonschema.validate(arguments, next(each.parameters for each in FUNCTIONS if each.name == called))
    if name != "Python calls":
        assert read(form_of(name), [CallTemplate(TEMPLATES[name]).calls(found)])[1] == found


@pytest.mark.parametrize("name", ["functions with parameters", "tags within tags"])
def test_the_grammar_allows_no_text_that_ends_a_string_early(name: str) -> None:
    """Models may leave out line breaks around tags, and parsers accept that."""
    text = CallTemplate(TEMPLATES[name]).calls([("get_weather", {"city": "Rome"})])
    spelled, end = Spelled(form_of(name), False), text[text.index("Rome") + 4 :].strip()
    assert spelled.passes(spelled.must, text.strip())
    assert spelled.passes(spelled.must, text.strip().replace("Rome", "a < b </p> {1}"))
    for early in (end, end.replace("\n", ""), end.replace("\n", " \n ")):
        assert not spelled.passes(spelled.must, text.strip().replace("Rome", f"Ro{early}me"))


@pytest.mark.parametrize("name", LOOSE_PYTHON)
def test_loose_python_is_read_beside_pythons_literals(name: str) -> None:
    """Models write Python literals even if their template does not."""
    template = CallTemplate(LOOSE_PYTHON[name])
    form = infer_format(template.render, ("<|im_end|>",))
    assert form is not None
    full = {**FULL, "city": "Rome (IT), old"}
    usual = CallTemplate(TEMPLATES["Python calls"]).calls([("get_weather", full), ("stop", {})])
    usual = usual.replace("<|call_start|>", "").replace("<|call_end|>", "")
    for text in (template.calls([("get_weather", full), ("stop", {})]), usual):
        for pieces in ([text], list(text)):
            assert read(form, pieces) == ("", [("get_weather", full), ("stop", {})])


@pytest.mark.parametrize(
    "body", ["Rome", "x=Rome", "city='Ro", "city=Rome(", "days=three", "city='a' 'b' days", 'city="a"days=']
)
def test_what_is_no_keyword_argument_is_content(body: str) -> None:
    form = infer_format(CallTemplate(LOOSE_PYTHON["no quotes"]).render, ("<|im_end|>",))
    assert form is not None
    text = f"[get_weather({body})]"
    assert read(form, [text]) == (text, [])


# -- hostile texts -------------------------------------------------------------------------------------------------


def test_ends_that_end_nothing_are_parsed_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each end tag could end the call. Each attempt to parse the call parses all text before the tag."""
    form, parsed = form_of("functions with parameters"), []

    def counted(form: TaggedArguments, text: str, schema: object, is_cut: bool) -> dict[str, Any]:
        parsed.append(len(text))
        return read_tagged(form, text, schema, is_cut)

    monkeypatch.setattr(held_call, "read_tagged", counted)
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\n" + "</parameter> x</function>\n</tool_call>" * 3_000
    reader, found = CallFormatReader(form, RULES), ParsedMessage()
    for start in range(0, len(text), 64):
        found.add(reader.push(text[start : start + 64]))
    found.add(reader.push("", is_last=True))
    assert (found.calls, found.content) == ([], text)
    assert len(parsed) > 100 and sum(parsed) < 3 << 20


@pytest.mark.few(5)
@pytest.mark.parametrize("name", TEMPLATES)
def test_many_beginnings_of_calls_take_work_in_proportion(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser gets the text after each beginning of a call, up to the limit of one attempt."""
    form, given, push = form_of(name), list[int](), held_call.HeldCall.push

    def counted(call: held_call.HeldCall, text: str, pieces: list[Any], is_last: bool) -> str:
        given.append(len(text))
        return push(call, text, pieces, is_last)

    monkeypatch.setattr(held_call.HeldCall, "push", counted)
    call = CallTemplate(TEMPLATES[name]).calls([("get_weather", {"city": "Rome"})])
    begun = call[: call.index("get_weather") + 12]
    text = begun * (64_000 // len(begun))
    read(form, [text], CallRules(frozenset({"other"}), True))
    assert 0 < sum(given) <= 64 * len(text)


def test_spaces_within_a_call_are_passed_once() -> None:
    """A pattern that scans all later spaces from each space would not end within this test's time limit."""
    form, spaces = form_of("functions with parameters"), " " * 100_000
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
    for place in ("\n<function", "\n<parameter", "\n</parameter", "\n</function", "\n</tool_call"):
        wide = text.replace(place, spaces + place)
        for pieces in ([wide], [wide[start : start + 5_000] for start in range(0, len(wide), 5_000)]):
            content, ((called, arguments),) = read(form, pieces)
            assert (content, called, arguments["city"].strip()) == ("", "get_weather", "Rome")


def test_tags_that_are_nested_too_deep_make_no_call() -> None:
    form = form_of("tags within tags")
    assert isinstance(form.arguments, TaggedArguments)
    middle, closing = form.arguments.middles["any"], form.arguments.closing
    for depth, is_call in ((60, True), (3_000, False)):
        keys = [f"a{number}" for number in range(depth)]
        value = "".join(f"{form.arguments.opening}{key}{middle}" for key in keys) + "x"
        value += "".join(closing.replace("{key}", key) for key in reversed(keys))
        call = CallTemplate(TEMPLATES["tags within tags"]).calls([("get_weather", {"city": "Rome"})])
        begin = call.index(form.arguments.opening + "city")
        end = call.index(closing.replace("{key}", "city")) + len(closing.replace("{key}", "city"))
        content, found = read(form, [text := call[:begin] + value + call[end:]])
        assert (len(found), content) == ((1, "") if is_call else (0, text))


def test_numbers_that_json_has_not_make_no_call() -> None:
    text = CallTemplate(TEMPLATES["Python calls"]).calls([("get_weather", {"days": 7})]).replace("=7", "=1e999")
    content, found = read(form_of("Python calls"), [text])
    assert (content, found) == (text, [])
