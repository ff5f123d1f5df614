"""Tests that values in messages are short, and that only the shown parts are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bridle.safe_repr import MAX_SHOWN_CHARS, short_repr


@pytest.mark.parametrize(
    "value", [None, True, 5, 1.5, float("nan"), "it's", b"\0", [], {}, [1, {"b": [2]}], {"b": 1, "a": 2}]
)
def test_short_values_are_their_repr(value: Any) -> None:
    assert short_repr(value) == repr(value)


@pytest.mark.parametrize(
    "value",
    ["é" * 10_000_000, b"\xff" * 10_000_000, [[1] * 1_000_000] * 50, {str(n): n for n in range(1000)}, 10**3000],
)
def test_long_values_are_cut(value: Any) -> None:
    assert len(short_repr(value)) <= MAX_SHOWN_CHARS + 3
    assert "..." in short_repr(value)


def test_the_rest_is_left_alone() -> None:
    seen = []

    class Watched(list[int]):
        def __iter__(self) -> Iterator[int]:
            for item in super().__iter__():
                seen.append(item)
                yield item

    short_repr({"a": Watched(range(1000))})
    assert len(seen) < 50
