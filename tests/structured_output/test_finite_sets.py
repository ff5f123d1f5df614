"""Tests of finite sets inside a constraint: the values of an enum are scored as a whole, even within a longer text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bridle.structured_output import Choice, Concat, JsonSchema
from bridle.structured_output.finite_sets import MAX_SET_OPTIONS, finite_sets
from tests.conftest import IS_FULL
from tests.structured_output.choices import exact
from tests.structured_output.kit import Lab, spell, text_vocabulary

PROMPT = (1, 2)
COLORS = ["red", "rose", "blue", "the name"]


def an_object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
        "$defs": {"color": {"enum": COLORS}},
    }


def best_after(lab: Lab, tokens: list[int], before: str, texts: list[str]) -> str:
    """Return the most probable of `texts` after the part of an output that ends with `before`."""
    sizes = (size for size in range(len(tokens)) if spell(lab.vocab, tokens[:size]).endswith(before))
    scores = exact(lab, tuple(texts), PROMPT + tuple(tokens[: next(sizes)]))
    return texts[scores.index(max(scores))]


SCHEMAS: list[tuple[dict[str, Any], str]] = [
    (an_object(c={"enum": COLORS}, n={"type": "integer"}), '{"c": "'),
    (an_object(n={"const": 7}, c={"$ref": "#/$defs/color"}), '"c": "'),
    (an_object(ok={"type": "boolean"}, c={"enum": COLORS}), '"ok": '),
    (an_object(c={"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]}), '"c": '),
    (an_object(c={"enum": ["a", "ab", "b"]}), '"c": "'),
    ({"type": "array", "items": {"enum": COLORS}, "minItems": 2, "maxItems": 3}, '["'),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("schema", "before"), SCHEMAS)
def test_values_inside_json_are_chosen_as_a_whole(schema: dict[str, Any], before: str) -> None:
    first = finite_sets(JsonSchema(schema))[0]
    texts = [text.removeprefix(first.prefix).decode() for text in first.texts]
    for seed in range(4 if IS_FULL else 2):
        with Lab(text_vocabulary(), seed=seed) as lab:
            output = lab.run_one(JsonSchema(schema))
            text = spell(lab.vocab, output.tokens)
            best = best_after(lab, output.tokens, before, texts)
            assert text.partition(before)[2].startswith(best)
            json.loads(text)


@pytest.mark.parametrize(
    "value",
    [
        {"anyOf": [{"enum": COLORS}, {"type": "string", "pattern": "^re.$"}]},  # more than the set
        {"type": "string", "enum": COLORS, "minLength": 5},  # less
        {"enum": [1, 12, 2]},  # one begins another
        {"enum": [str(number) for number in range(MAX_SET_OPTIONS + 1)]},
    ],
)
def test_masks_do_where_a_place_allows_no_known_set(value: dict[str, Any]) -> None:
    with Lab(text_vocabulary(), record=True) as lab:
        text = spell(lab.vocab, lab.run_one(JsonSchema(an_object(c=value))).tokens)
        assert json.loads(text)
        assert not any(batch.scores for batch in lab.executor.batches)


def test_values_are_not_scored_if_the_schema_says_so() -> None:
    with Lab(text_vocabulary(), record=True) as lab:
        lab.run_one(JsonSchema(SCHEMAS[0][0], scored=False))
        assert not any(batch.scores for batch in lab.executor.batches)


def test_options_inside_a_sequence_are_chosen_as_a_whole() -> None:
    colors = ["red", "rose", "blue"]
    for seed in range(6 if IS_FULL else 3):
        with Lab(text_vocabulary(), seed=seed) as lab:
            output = lab.run_one(Concat("the ", Choice(colors), " name"))
            text = spell(lab.vocab, output.tokens)
            assert text == f"the {best_after(lab, output.tokens, 'the ', colors)} name"
