"""Tests of counting the values of a JSON text exactly, without building it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.errors import InvalidRequest
from bridle.serving.requests.json_size import JsonSize, json_size, limit_for

TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from('"\\,[]{}:'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=20,
)


def counted(value: Any) -> JsonSize:
    """Return the counts of a parsed value, for comparison."""
    if isinstance(value, str):
        return JsonSize(1, 1)
    if not isinstance(value, (list, dict)):
        return JsonSize(0, 1)
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    names = len(value) if isinstance(value, dict) else 0
    # Commas and one: a value of its own has none, each further one in the same place is after a comma.
    num_values = sum(each.num_values for each in inner) if inner else 1
    return JsonSize(1 + names + sum(each.num_nodes for each in inner), num_values)


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_the_count_is_what_a_parser_builds(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert json_size(text) == counted(value)


@given(VALUES, st.binary(max_size=8))
def test_what_comes_after_an_error_hides_nothing_before_it(value: Any, rest: bytes) -> None:
    text = json.dumps([value, "x"]).encode()
    assert json_size(text + b"\\" + rest).num_nodes >= counted([value, "x"]).num_nodes


def test_limits_name_value_and_limit() -> None:
    limit = JsonSize(num_nodes=3, num_values=4)
    json_size(b'["a", "b", 1, 2]').check(limit)
    with pytest.raises(InvalidRequest, match="has 4 texts, names, lists and objects; at most 3"):
        json_size(b'["a", "b", "c"]').check(limit)
    with pytest.raises(InvalidRequest, match="has 5 values; at most 4"):
        json_size(b"[1, 2, 3, 4, 5]").check(limit)
    assert limit_for(1) == limit_for(4 << 20) == JsonSize(65_536, 524_288)
    assert limit_for(8 << 20) == JsonSize(131_072, 1_048_576)
