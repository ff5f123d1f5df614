"""Tests of gpt-oss channels: `analysis` becomes reasoning, `final` becomes content, and a message to a function becomes
a tool call."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.chat.stream_deltas import CallRules, ParsedMessage
from bridle.chat.tool_parsers.grammar import Function
from bridle.chat.tool_parsers.harmony import Harmony, HarmonyReader
from bridle.structured_output.grammar import grammar_of
from bridle.structured_output.matcher import Matcher
from bridle.structured_output.vocabulary import GrammarVocabulary

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
SPECIALS = {mark: 257 + number for number, mark in enumerate(MARKS)}
THOUGHT = "<|channel|>analysis<|message|>Hm, 1 < 2.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
ANSWER = "<|channel|>final<|message|>It is <b>.<|return|>"
WANT = ("f", {"city": "Rome"})


def read(pieces: list[str]) -> tuple[str, str, list[tuple[str, object]]]:
    reader, found = HarmonyReader(CallRules(frozenset({"f"}), is_held=True)), ParsedMessage()
    for position, piece in enumerate(pieces):
        found.add(reader.push(piece, is_last=position == len(pieces) - 1))
    return found.thoughts, found.content, [(call.name, json.loads(call.arguments)) for call in found.calls]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (THOUGHT + ANSWER, ("Hm, 1 < 2.", "It is <b>.", [])),
        (ANSWER, ("", "It is <b>.", [])),
        (THOUGHT + CALL, ("Hm, 1 < 2.", "", [WANT])),
        (' to=functions.f<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>', ("", "", [WANT])),
        (
            THOUGHT + "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant" + CALL,
            ("Hm, 1 < 2.", "I look it up.", [WANT]),
        ),
        ("plain text", ("", "plain text", [])),
        ("", ("", "", [])),
        ("<|channel|>analysis<|message|>cut o", ("cut o", "", [])),
        (CALL.replace("functions.f", "functions.g"), ("", '{"city": "Rome"}', [])),
        (CALL.replace("Rome", 'Ro"me'), ("", '{"city": "Ro"me"}', [])),
    ],
)
def test_messages_are_told_apart(text: str, expected: object) -> None:
    assert read([text]) == expected
    assert read([*text, ""]) == expected


@given(
    st.lists(st.sampled_from([THOUGHT, CALL, ANSWER, *MARKS, "a", "final", "<|", '{"a": 1}']), max_size=6),
    st.lists(st.integers(0, 300), max_size=8),
)
def test_what_is_read_does_not_depend_on_how_the_text_arrives(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert read([text[start:end] for start, end in pairwise(bounds)]) == read([text])


@pytest.mark.parametrize("text", ["<|start|>", "a<|start|>", "<|start|>" * 3 + "assistant" + "x" * 600])
def test_marks_that_begin_no_message_end_the_reading(text: str) -> None:
    assert "<|start|>" not in str(read([text]))


def passes(matcher: Matcher, text: str) -> bool:
    for piece in re.split("(" + "|".join(map(re.escape, MARKS)) + ")", text):
        for token in [SPECIALS[piece]] if piece in SPECIALS else list(piece.encode()):
            if not matcher.mask()[token >> 3] >> (token & 7) & 1:
                return False
            matcher.commit([token])
    return matcher.is_accepting


def test_grammars_hold_calls_to_the_schema() -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *(mark.encode() for mark in MARKS)]
    vocabulary = GrammarVocabulary(tokens, [256], [256, *SPECIALS.values()], lambda text: list(text.encode()))
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    kind, functions = Harmony(SPECIALS), [Function("f", schema)]
    must = Matcher(vocabulary, grammar_of(kind.must_call(functions, 1).constraint()))
    form = kind.may_call(functions)
    assert form is not None
    may = Matcher(vocabulary, grammar_of(form.constraint()))
    answer = ANSWER.removesuffix("<|return|>")
    for text in (CALL, THOUGHT + CALL, THOUGHT + THOUGHT + CALL):
        assert passes(must.copy(), text) and passes(may.copy(), text)
    assert passes(may.copy(), THOUGHT + answer) and not passes(must.copy(), THOUGHT + answer)
    assert not passes(may.copy(), CALL.replace("Rome", "Oslo"))
