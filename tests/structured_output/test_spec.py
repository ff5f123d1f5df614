"""Tests that a constraint is checked when it is created, and that errors name the value and the limit."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from bridle.errors import InvalidRequest
from bridle.structured_output import (
    After,
    Choice,
    Concat,
    Constraint,
    JsonObject,
    JsonSchema,
    Lark,
    OneOf,
    Regex,
    Substring,
    Yacc,
    parse,
)
from bridle.structured_output.limits import MAX_BYTES, MAX_NESTING, MAX_OPTIONS
from bridle.structured_output.request_fields import constraint_named

ALL: list[Constraint] = [
    Regex("a+"),
    JsonSchema({"type": "object", "properties": {"b": {}, "a": {}}}),
    JsonSchema({"type": "string"}, whitespace="flexible"),
    JsonObject(),
    JsonObject("flexible"),
    Lark('start: "a"'),
    Yacc('%start a\n%%\na: "x";'),
    Choice(["yes", "no"]),
    Substring("to be", end=".", unit="char"),
    Concat("A: ", Regex("[0-9]"), OneOf("x", Choice(["y", "z"]))),
    After("</think>", JsonObject()),
]


@pytest.mark.parametrize("constraint", ALL, ids=lambda each: type(each).__name__)
def test_plain_data_gives_the_same_constraint(constraint: Constraint) -> None:
    again = parse(constraint.to_dict())
    assert again == constraint
    assert again.key == constraint.key
    assert constraint.max_rewind == 0


def test_different_constraints_have_different_keys() -> None:
    assert len({constraint.key for constraint in ALL}) == len(ALL)


def test_a_schema_may_be_a_mapping_a_text_or_a_model() -> None:
    class Point(BaseModel):
        x: int

    assert JsonSchema('{"type": "integer"}') == JsonSchema({"type": "integer"})
    assert JsonSchema(True) == JsonSchema({})
    assert '"x"' in JsonSchema(Point).schema


def test_the_order_of_a_schema_is_kept() -> None:
    assert JsonSchema({"b": 1, "a": 2}).schema.index("b") < JsonSchema({"b": 1, "a": 2}).schema.index('"a"')


def nested(depth: int) -> dict[str, object]:
    data: dict[str, object] = {"regex": "a"}
    for _ in range(depth):
        data = {"sequence": [data]}
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (5, "the constraint is 5; must be an object such as {'regex': 'a+'}"),
        ({}, "the constraint has none of regex, json_schema,"),
        ({"regex": "a", "lark": "b"}, "has 'regex' and 'lark' of"),
        ({"regex": 5}, "regex is 5; must be a text"),
        ({"regex": "a", "flags": 1}, "a constraint of kind 'regex' has no field 'flags'"),
        ({"regex": "(" * 60_000 + ")" * 60_000}, "regex nests 60000 brackets; at most 200"),
        ({"regex": "a" * (MAX_BYTES + 1)}, f"regex has {MAX_BYTES + 1} bytes; at most {MAX_BYTES}"),
        ({"regex": "\ud800"}, "regex is not valid Unicode at character 0"),
        ({"json_schema": 5}, "json_schema is 5; must be an object"),
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"json_schema": {"const": float("nan")}}, "json_schema is not JSON"),
        ({"json_schema": {"default": object()}}, "json_schema is not JSON"),
        ({"json_schema": '{"items":' * 300 + "{}" + "}" * 300}, "json_schema nests more than 100 values"),
        ({"json_schema": '{"items":' * 50_000 + "{}" + "}" * 50_000}, "json_schema"),
        ({"json_schema": {}, "whitespace": "some"}, "whitespace is 'some'; must be 'fixed' or 'flexible'"),
        ({"json_object": False}, "json_object is False; must be true"),
        ({"choice": "yes"}, "choice is 'yes'; must be a list of texts"),
        ({"choice": []}, "choice has 0 options; must have 1 to 20000"),
        ({"choice": ["a"] * (MAX_OPTIONS + 1)}, f"choice has {MAX_OPTIONS + 1} options"),
        ({"choice": ["a" * MAX_BYTES, "b"]}, f"choice has {MAX_BYTES + 1} bytes"),
        ({"choice": [1]}, "choice is 1; must be a text"),
        ({"substring": "  "}, "substring has 2 characters; must have 1 to 65536, and not only white space"),
        ({"substring": "a", "unit": "line"}, "unit is 'line'"),
        ({"sequence": []}, "sequence has 0 parts; must have 1 to 64"),
        ({"any_of": "ab"}, "any_of is 'ab'; must be a list"),
        ({"after": "x"}, "a constraint of kind 'after' needs the field 'then'"),
        ({"after": "", "then": "a"}, "after is empty"),
        (nested(MAX_NESTING + 1), f"nests more than {MAX_NESTING} combinations"),
        (nested(5_000), f"nests more than {MAX_NESTING} combinations"),
    ],
)
def test_what_is_wrong_is_said(data: object, message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse(data)
    assert message in str(refusal.value)
    assert len(str(refusal.value)) < 400
    assert refusal.value.param == "constraint"


def test_brackets_that_are_escaped_do_not_nest() -> None:
    assert Regex(r"\(" * 300).pattern


def test_objects_are_checked_like_data() -> None:
    with pytest.raises(InvalidRequest, match="sequence holds 5; must hold constraints or texts"):
        Concat(5)  # type: ignore[arg-type]
    inner: Constraint = Regex("a")
    for _ in range(MAX_NESTING):
        inner = OneOf(inner)
    with pytest.raises(InvalidRequest, match="any_of nests 9 combinations; at most 8"):
        OneOf(inner)


LARK = 'start: "red" | "blue"'


def test_the_same_constraint_under_two_names_counts_once() -> None:
    """guidance sends its grammar in two fields at once, for old and new vLLM servers."""
    given = {"guided_grammar": LARK, "structured_outputs": {"grammar": LARK}, "response_format": {"type": "text"}}
    assert constraint_named(given) == constraint_named({"grammar": LARK}) == Lark(LARK)
    with pytest.raises(InvalidRequest, match="structured_outputs and guided_grammar were given") as refusal:
        constraint_named({"structured_outputs": {"regex": "a"}, "guided_grammar": LARK})
    assert refusal.value.param == "guided_grammar"


def test_a_grammar_may_have_the_shape_of_text_generation_inference() -> None:
    assert constraint_named({"grammar": {"type": "regex", "value": "a+"}}) == Regex("a+")
    assert constraint_named({"grammar": {"type": "json", "value": {"type": "string"}}}) == JsonSchema(
        {"type": "string"}
    )
    for wrong in ({"type": "regex"}, {"type": "lark", "value": LARK}, {}):
        with pytest.raises(InvalidRequest, match="an object must have a type") as refusal:
            constraint_named({"grammar": wrong})
        assert refusal.value.param == "grammar"
