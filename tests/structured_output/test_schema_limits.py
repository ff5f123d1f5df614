"""Tests of limits that schemas do not state: digits and properties are bounded, and no forbidden text is allowed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from bridle.errors import InvalidRequest
from bridle.structured_output import JsonSchema
from bridle.structured_output.schema_limits import bounded
from tests.conftest import examples
from tests.structured_output.kit import generate, matcher, tokens_of, vocabulary

VOCABULARY = vocabulary(map(chr, range(1, 128)))


def accepts(schema: dict[str, Any], text: str) -> bool:
    walk = matcher(VOCABULARY, JsonSchema(schema))
    for char in text:
        if walk.is_complete or ord(char) not in tokens_of(walk.mask()):
            return False
        walk.commit([ord(char)])
    return walk.is_complete or walk.is_accepting


OBJECT = {"type": "object", "properties": {"a": {"type": ["integer", "null"]}}}


@pytest.mark.parametrize(
    ("schema", "taken", "ended"),
    [
        ({"type": "integer"}, "9" * 15, "9" * 16),
        ({"type": "integer", "minimum": 0}, "9" * 15, "9" * 16),
        ({"type": "number"}, "-1.123456789", "1.1234567891"),
        ({"type": "number"}, "8.5", "8.5e-1"),
        ({"type": "integer", "x-limits": {"exponents": True}}, "9" * 15, "9" * 16),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", "1" * 16),
        (OBJECT, '{"a": 12}', '{"b": 1}'),
        ({"$ref": "#/$defs/x", "$defs": {"x": OBJECT}}, '{"a": null}', '{"a": 1, "b": 1}'),
        ({"type": "array", "items": {"type": "number"}}, "[0.5, 2]", "[0.0000000001]"),
        ({"type": "integer", "x-limits": {"digits": 3}}, "999", "1000"),
        ({"type": "number", "x-limits": {"decimals": 0}}, "12", "1.5"),
    ],
)
def test_what_a_weak_model_would_go_on_with_ends(schema: dict[str, Any], taken: str, ended: str) -> None:
    assert accepts(schema, taken)
    assert not accepts(schema, ended)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer", "x-limits": False}, "9" * 40),
        ({"type": "integer", "minimum": 10**17}, str(10**17)),
        ({"type": "number", "minimum": 0, "maximum": 1e-10}, "0.00000000005"),
        ({"type": "number", "x-limits": {"exponents": True}}, "-8.854e-12"),
        (OBJECT | {"x-limits": {"closed": False}}, '{"b": 1}'),
        (OBJECT | {"additionalProperties": True}, '{"b": 1}'),
        ({"type": "object"}, '{"anything": {"at": 1}}'),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, '{"b": 1}'),
        ({"enum": [10**18]}, str(10**18)),
        ({"allOf": [{"type": "integer"}, {"minimum": 10**17}]}, str(10**17)),
    ],
)
def test_what_a_schema_says_counts(schema: dict[str, Any], text: str) -> None:
    assert accepts(schema, text)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (3, "x-limits is 3; must be false, or an object with digits, decimals, closed, exponents"),
        ({"digit": 3}, "x-limits has no field 'digit'"),
        ({"digits": 0}, "x-limits.digits is 0; must be at most 300"),
        ({"decimals": 10}, "x-limits.decimals is 10; must be at most 9"),
        ({"closed": 1}, "x-limits.closed is 1"),
    ],
)
def test_limits_that_are_none_are_refused(given: Any, told: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        bounded({"type": "integer", "x-limits": given})
    assert told in str(refusal.value)


NUMBERS = st.one_of(st.integers(-(10**17), 10**17), st.integers(-5, 5), st.just(0.5))
LEAF = st.one_of(
    st.builds(lambda kind: {"type": kind}, st.sampled_from(["integer", "number", "boolean", "null"])),
    st.builds(lambda low: {"type": "integer", "minimum": low}, st.integers(-(10**17), 10**17)),
    st.builds(lambda low, size: {"type": "number", "minimum": low, "maximum": low + size}, NUMBERS, st.integers(0, 4)),
    st.builds(lambda high: {"type": ["integer", "null"], "exclusiveMaximum": high}, st.integers(-(10**17), 10**17)),
)
SCHEMAS = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        st.builds(
            lambda named, required: {
                "type": "object",
                "properties": named,
                "required": ["a"] if required else [],
            },
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.booleans(),
        ),
        st.builds(lambda each: {"type": "array", "items": each, "maxItems": 2}, inner),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=4,
)


@given(SCHEMAS, st.integers(0, 1000))
@settings(max_examples=examples(40), deadline=None)
def test_what_is_written_within_limits_fits_the_schema(schema: dict[str, Any], seed: int) -> None:
    schema = json.loads(json.dumps(schema))
    start = matcher(VOCABULARY, JsonSchema(schema))
    text = generate(VOCABULARY, start, random.Random(seed), prefer=(*'}],"', "e"))
    if text is not None:
        assert Draft202012Validator(schema).is_valid(json.loads(text)), text
