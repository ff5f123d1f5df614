"""Tests that GBNF grammars have the meaning of llama.cpp, and that an unsupported grammar is refused with its line."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.errors import InvalidRequest
from bridle.structured_output import Gbnf, JsonSchema, parse
from bridle.structured_output.gbnf import gbnf_to_lark, is_gbnf
from bridle.structured_output.request_fields import constraint_named
from bridle.structured_output.structural_tag import structural_tag
from tests.conftest import examples
from tests.structured_output.kit import allows, text_vocabulary

VOCABULARY = text_vocabulary()
JSON = r"""
# llama.cpp's own style: rules over several lines, recursion, comments
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def accepts(constraint: Gbnf, text: str) -> bool:
    """Return whether the constraint allows the whole text, character by character."""
    return allows(VOCABULARY, constraint, text)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a": [1, -2.5e3, {}], "b": "\\u00e9\\n"}', True),
        ('{"a": true, "b": null}\n', True),
        ('{"a": tru}', False),
        ("[1]", False),
        ('{"a": 01}', False),
    ],
)
def test_the_usual_grammar_of_json(text: str, fits: bool) -> None:
    assert accepts(Gbnf(JSON), text) is fits


def test_no_terminal_takes_what_the_next_one_needs() -> None:
    """A greedy lexer would consume the last letter, and the text could never end."""
    grammar = Gbnf('root ::= [a-z]* "a" | "ab" "c" | "a" "bd"')
    assert all(accepts(grammar, text) for text in ("a", "xyza", "abc", "abd"))
    assert not any(accepts(grammar, text) for text in ("", "xyz", "abe"))


# -- the property: a grammar without recursion is a regex ----------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A part of a grammar, as GBNF and as a regular expression."""

    gbnf: str
    regex: str


def _joined(parts: list[Part]) -> Part:
    return Part(f"({' '.join(p.gbnf for p in parts)})", f"(?:{''.join(p.regex for p in parts)})")


def _any_of(parts: list[Part]) -> Part:
    return Part(f"({' | '.join(p.gbnf for p in parts)})", f"(?:{'|'.join(p.regex for p in parts)})")


LEAVES = st.one_of(
    st.text("abc", max_size=3).map(lambda text: Part(f'"{text}"', text)),
    st.sampled_from(["[ab]", "[^a]", "[a-c]", "[\\x61c]"]).map(lambda text: Part(text, text)),
    st.just(Part(".", "(?s:.)")),
)
PARTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(_joined),
        st.lists(inner, min_size=1, max_size=3).map(_any_of),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,2}"])).map(
            lambda pair: Part(f"({pair[0].gbnf}){pair[1]}", f"(?:{pair[0].regex}){pair[1]}")
        ),
    ),
    max_leaves=6,
)


@given(PARTS, PARTS, st.lists(st.text("abcd", max_size=5), min_size=1, max_size=4))
@settings(max_examples=examples(60), deadline=None)
def test_a_grammar_without_recursion_is_a_regex(first: Part, second: Part, texts: list[str]) -> None:
    grammar = Gbnf(f"root ::= {first.gbnf}\n  other-rule\nother-rule ::= {second.gbnf} # the end")
    for text in texts:
        assert accepts(grammar, text) is bool(re.fullmatch(first.regex + second.regex, text))


# -- what is wrong is named -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        ('root ::= "a"\n\nroot ::= "b"', "line 3 defines 'root' again"),
        ('root ::= "a" b', "rule 'b' is not defined on line 1"),
        ('other ::= "a"', "rule 'root' is not defined"),
        ('root ::= ("a"\n | "b"', "line 1 opens a group that is not closed"),
        ('root ::= "a")', "line 1 closes a group that was not opened"),
        ("root ::= \n * ", "line 2 has '*' with nothing before it to repeat"),
        ('root ::= "a"*+', "line 1 repeats a repetition"),
        ('root ::= "a"{5,2}', "line 1 has the range {5,2}; the second"),
        ('root ::= "a"{3000}', "line 1 repeats 3000 times; at most 2000"),
        ('root ::= "a"{}', "without a number of repetitions"),
        ("root ::= []", "line 1 has a character class without characters"),
        ("root ::= [z-a]", "line 1 reverses a range 'z-a'"),
        ('root ::= "\\q"', "line 1 has an unknown escape: '\\\\q'"),
        ('root ::= "\\ud800"', "line 1 has an escape that is not a character"),
        ('root ::= "a"\nb ::= <think>', "line 2 has a syntax error at '<think>'"),
        ('"a" root ::= "b"', "line 1 has '\"a\"' instead of a new rule"),
        ('root ::= ::= "b"', "line 1 has '::=' where it is not allowed in a rule"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(grammar: str, told: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        gbnf_to_lark(grammar)
    assert told in str(refusal.value)


def test_notations_are_told_apart() -> None:
    assert is_gbnf('\n  root ::= "a"') and not is_gbnf('start: "::="\nother: "b"')
    assert parse({"gbnf": 'root ::= "a"'}) == Gbnf('root ::= "a"') == constraint_named({"grammar": 'root ::= "a"'})
    assert Gbnf("root ::= [a]").to_dict() == {"gbnf": "root ::= [a]"}


# -- structural tags ------------------------------------------------------------------------------------------


def test_a_structural_tag_binds_what_follows_its_trigger() -> None:
    form = structural_tag(
        {
            "structures": [
                {"begin": "<call=add>", "schema": {"enum": [1, 2]}, "end": "</call>"},
                {"begin": "<call=no>", "schema": {"type": "boolean"}, "end": "</call>"},
            ],
            "triggers": ["<call="],
        }
    )
    assert all(
        accepts(form, text)  # type: ignore[arg-type]
        for text in ("free text", "so: <call=add>1</call> and <call=no>true</call>.", "")
    )
    assert not any(accepts(form, text) for text in ("<call=other>1</call>", "<call=add>3</call>", "<call=no>1</call>"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ("{", "structural_tag is not JSON"),
        ([], "structural_tag is []; must be an object"),
        ({"structures": [], "triggers": ["a"]}, "structural_tag has 0 structures; must have 1 to"),
        ({"structures": [{}], "triggers": [""]}, "must hold texts that are not empty"),
        ({"structures": [3], "triggers": ["a"]}, "structures[0] is 3; must be an object"),
        ({"structures": [{"begin": 3}], "triggers": ["a"]}, "structures[0] needs 'begin' and 'end'"),
        ({"structures": [{"begin": "b"}], "triggers": ["a"]}, "structures[0] begins with 'b', which no trigger begins"),
        ({"structures": [{"begin": "a", "schema": 3}], "triggers": ["a"]}, "json_schema is 3; must be an object"),
    ],
)
def test_what_is_wrong_with_a_structural_tag(form: object, told: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        structural_tag(form)
    assert told in str(refusal.value)


def test_a_pydantic_model_is_a_format() -> None:
    from pydantic import BaseModel

    class Thing(BaseModel):
        size: int

    assert constraint_named({"response_format": Thing}) == JsonSchema(Thing)
