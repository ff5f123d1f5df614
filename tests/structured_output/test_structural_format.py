"""Tests of a structural tag's `format`: each kind is enforced, and unsupported formats are refused with their path."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.errors import InvalidRequest
from bridle.structured_output.request_fields import constraint_named
from bridle.structured_output.structural_tag import structural_tag
from tests.conftest import examples
from tests.structured_output.kit import allows, vocabulary

VOCABULARY = vocabulary(map(chr, range(1, 128)))
ANY: dict[str, Any] = {"type": "any_text"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def accepts(form: dict[str, Any], text: str) -> bool:
    """Return whether the format allows a whole text, character by character."""
    return allows(VOCABULARY, structural_tag({"type": "structural_tag", "format": form}), text)


NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
CALL = tag("<call=add>", NUMBER, "</call>")
NAME = tag("<call=name>", {"type": "regex", "pattern": "[a-z]+"}, "</call>")
TAGS = {"tags": [CALL, NAME], "triggers": ["<call="]}


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (const("abc"), ["abc"], ["", "ab", "abcd"]),
        (NUMBER, ["12", "-3"], ["x", "", "1.5"]),
        ({"type": "regex", "pattern": "a/[0-9]"}, ["a/1"], ["a/x", "a"]),
        ({"type": "grammar", "grammar": 'root ::= "a" | "b" root'}, ["a", "bba"], ["b", "ab"]),
        (ANY, ["", "what ever"], []),
        ({"type": "sequence", "elements": [const("x"), NUMBER, const("y")]}, ["x1y"], ["x1", "xy"]),
        ({"type": "or", "elements": [const("x"), NUMBER, CALL]}, ["x", "4", "<call=add>1</call>"], ["x4", "<call"]),
        (tag("<t>", ANY, "</t>"), ["<t>a < b</t>", "<t></t>"], ["<t>a", "a</t>", "<t></t>b"]),
        (tag("<t>", ANY, ["</t>", "."]), ["<t>a</t>", "<t>a."], ["<t>a", "<t>a</t>."]),
        (tag("<t>", ANY, ""), ["<t>a", "<t>"], ["<", "a"]),
        ({"type": "sequence", "elements": [ANY, tag("<t>", NUMBER, "</t>")]}, ["so <t>1</t>"], ["so", "so <t>x</t>"]),
        ({"type": "sequence", "elements": [tag("<think>", ANY, "</think>"), NUMBER]}, ["<think>a</think>1"], ["1"]),
        (
            {"type": "triggered_tags", **TAGS},
            ["", "free", "so <call=add>1</call> and <call=name>ab</call>."],
            ["<call=other>1</call>", "<call=add>ab</call>", "<call=add>1"],
        ),
        (
            {"type": "triggered_tags", **TAGS, "at_least_one": True},
            ["so <call=add>1</call>.", "<call=add>1</call><call=add>1</call>"],
            ["", "free", "<call=no>"],
        ),
        (
            {"type": "triggered_tags", **TAGS, "stop_after_first": True},
            ["", "free", "so <call=add>1</call>"],
            ["so <call=add>1</call>.", "<call=no>"],
        ),
        (
            {"type": "tags_with_separator", "tags": [CALL, NAME], "separator": ","},
            ["", "<call=add>1</call>", "<call=add>1</call>,<call=name>a</call>"],
            [",", "<call=add>1</call>,", "<call=add>1</call><call=add>1</call>"],
        ),
        (
            {"type": "tags_with_separator", "tags": [CALL], "separator": ",", "at_least_one": True},
            ["<call=add>1</call>"],
            [""],
        ),
    ],
)
def test_a_format_allows_what_it_says(form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(form, text)] == []
    assert [text for text in bad if accepts(form, text)] == []


#: A format, the regex that it looks like, and a text that both allow. No text begins another one, and regexes stand
#: between texts, since each takes all that it can.
Made = tuple[dict[str, Any], str, str]
_TEXT = st.sampled_from(["<1", "<2", "<3"])
_REGEX = st.sampled_from([("[ab]{1,2}", "b"), ("(ab)*", "abab"), ("(ab)*", "")])


def _tagged(begin: str, inner: Made, end: str) -> Made:
    form, pattern, text = inner
    return tag(begin, form, end), begin + pattern + end, begin + text + end


_LEAF = _TEXT.map(lambda text: (const(text), text, text)) | st.builds(
    lambda begin, regex, end: _tagged(begin, ({"type": "regex", "pattern": regex[0]}, *regex), end),
    _TEXT,
    _REGEX,
    _TEXT,
)


def _combined(inner: st.SearchStrategy[Made]) -> st.SearchStrategy[Made]:
    def sequence(some: list[Made]) -> Made:
        forms, patterns, texts = zip(*some, strict=True)
        return {"type": "sequence", "elements": list(forms)}, "".join(patterns), "".join(texts)

    def either(some: list[Made]) -> Made:
        forms, patterns, texts = zip(*some, strict=True)
        return {"type": "or", "elements": list(forms)}, f"({'|'.join(patterns)})", texts[-1]

    parts = st.lists(inner, min_size=1, max_size=3)
    return parts.map(sequence) | parts.map(either) | st.builds(_tagged, _TEXT, inner, _TEXT)


@given(st.recursive(_LEAF, _combined, max_leaves=5), st.integers(0, 60), st.sampled_from("ab<1"))
@settings(max_examples=examples(40), deadline=None)
def test_combinations_are_the_regexes_that_they_look_like(made: Made, place: int, char: str) -> None:
    form, pattern, text = made
    assert accepts(form, text)
    for changed in (text[:place] + text[place + 1 :], text[:place] + char + text[place:], text[: len(text) // 2]):
        assert accepts(form, changed) == (re.fullmatch(pattern, changed) is not None), (pattern, changed)


@pytest.mark.parametrize(
    ("form", "told"),
    [
        (3, "structural_tag.format is 3; must be an object"),
        ({}, "structural_tag.format.type is None; this server takes const_string, json_schema"),
        ({"type": "qwen_xml_parameter"}, "structural_tag.format.type is 'qwen_xml_parameter'; this server takes"),
        ({"type": "any_text", "excludes": ["x"]}, "structural_tag.format has 'excludes'; any_text takes none"),
        ({"type": "const_string"}, "structural_tag.format.value is None; must be a text"),
        ({"type": "sequence", "elements": [ANY, NUMBER]}, "elements[0] is free text; only a fixed"),
        ({"type": "sequence", "elements": [{"type": "or", "elements": [ANY]}, const("a")]}, "is free text"),
        ({"type": "sequence", "elements": []}, "structural_tag.format.elements has 0 entries; must have 1 to"),
        ({"type": "tag", "begin": 3, "content": ANY}, "structural_tag.format needs 'begin'"),
        (tag("a", {"type": "regex", "pattern": 3}, ""), "structural_tag.format.content.pattern is 3; must be a text"),
        ({"type": "triggered_tags", **TAGS, "triggers": ["x"]}, "tags[0] begins with '<call=add>', which no"),
        ({"type": "sequence", "elements": [{"type": "triggered_tags", **TAGS}, const("a")]}, "no format may follow"),
        ({"type": "json_schema", "json_schema": 3}, "json_schema is 3; must be an object"),
    ],
)
def test_what_is_wrong_with_a_format(form: Any, told: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        constraint_named({"response_format": {"type": "structural_tag", "format": form}})
    assert told in str(refusal.value) and refusal.value.param == "response_format"


def test_formats_do_not_nest_without_end() -> None:
    form: dict[str, Any] = const("a")
    for _ in range(300):
        form = {"type": "sequence", "elements": [form]}
    with pytest.raises(InvalidRequest, match="nests more than 8 formats"):
        structural_tag({"format": form})
