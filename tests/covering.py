"""A few of all cases or combinations, for tests of which each takes long. `make test-all` runs the others, too."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def covering(*axes: Iterable[Any]) -> list[Any]:
    """All combinations of the axes' values, for `parametrize`. As many of them as the longest axis has values always
    run, and have each value of each axis."""
    values = [list(axis) for axis in axes]
    always = {tuple(number % len(axis) for axis in values) for number in range(max(map(len, values)))}
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(values, places, strict=True)),
            marks=() if places in always else pytest.mark.slow,
        )
        for places in product(*(range(len(axis)) for axis in values))
    ]


def slow_but(quick: Collection[str], cases: Iterable[str]) -> list[Any]:
    """All cases, of which those that are not in `quick` are marked as slow. `quick` has one of each kind of code."""
    found = [each if each in quick else pytest.param(each, marks=pytest.mark.slow) for each in cases]
    assert len(quick) == sum(isinstance(each, str) for each in found)
    return found
