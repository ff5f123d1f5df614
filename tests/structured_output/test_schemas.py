"""Tests that every text generated under a JSON schema is valid for an independent validator."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from bridle.structured_output import JsonSchema
from bridle.structured_output.spec import Whitespace
from tests.structured_output.kit import generate, matcher, text_vocabulary

CLOSING = '"}]'
VOCABULARY = text_vocabulary()
NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer", "minimum": 0, "maximum": 9},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
    },
    "required": ["value", "next"],
    "additionalProperties": False,
}


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a random schema of nested objects, arrays, choices and references, with bounds."""
    leaves = (_string, _integer, _number, _enum, _fixed)
    branches = (_object, _array, _any_of, _reference)
    make = rng.choice(leaves if depth >= 3 else leaves + branches + (_object,))
    return make(rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    pattern = rng.choice((None, "^[a-f]{2,4}$", "[0-9]{3}-[0-9]{4}", "^(x|yy)*$"))
    if pattern is not None:
        return {"type": "string", "pattern": pattern}
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 6)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-200, 200)
    return {"type": "integer", "minimum": low, "maximum": low + rng.choice((0, 7, 130, 5000))}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number", "minimum": -2.5, "exclusiveMaximum": rng.choice((0, 1.25, 300))}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    values = ["red", "green", 'q"uote', 3, -1.5, None, True, [1, 2], {"a": 1}]
    return {"enum": rng.sample(values, rng.randint(1, 6))}


def _fixed(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice(({"type": "null"}, {"type": "boolean"}, {"const": "this"}, {"const": [1, None]}))


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = [f"{rng.choice(('name', 'size', 'a b', 'x'))}{i}" for i in range(rng.randint(0, 4))]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }
    if rng.random() < 0.2:
        schema["additionalProperties"] = {"type": "boolean"}
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    schema = {"type": "array", "items": random_schema(rng, depth + 1), "minItems": low, "maxItems": low + 2}
    if rng.random() < 0.3:
        schema["prefixItems"] = [random_schema(rng, depth + 1)]
    return schema


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(2, 3))]}


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"$ref": "#/$defs/node"}


def documents(schema: dict[str, Any], whitespace: Whitespace, rng: random.Random) -> list[str]:
    start = matcher(VOCABULARY, JsonSchema(schema, whitespace))
    texts = [generate(VOCABULARY, start, rng, prefer=CLOSING) for _ in range(3)]
    return [text for text in texts if text is not None]


@pytest.mark.few(3)
@pytest.mark.parametrize("group", range(10))
def test_five_hundred_schemas_give_valid_documents_only(group: int) -> None:
    num_documents = 0
    for seed in range(50 * group, 50 * group + 50):
        rng = random.Random(seed)
        schema = {**random_schema(rng), "$defs": {"node": NODE}}
        validator = Draft202012Validator(schema)
        for text in documents(schema, rng.choice(("fixed", "flexible")), rng):
            wrong = [error.message for error in validator.iter_errors(json.loads(text))]
            assert not wrong, (seed, text, schema)
            num_documents += 1
    assert num_documents > 100  # some walks do not end; most do


def test_fixed_white_space_is_pythons_own() -> None:
    schema = {"type": "object", "properties": {"a": {"const": [1, {"b": None}]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    assert documents(schema, "fixed", random.Random(0)) == [json.dumps({"a": [1, {"b": None}]})] * 3
