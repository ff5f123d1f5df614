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


def mark_the_rest(items: Iterable[pytest.Item]) -> None:
    """Mark as slow all cases of each test with `few(number)` but that many, which are spread over its cases."""
    tests: dict[tuple[Any, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            tests.setdefault((item.path, item.name.split("[")[0]), []).append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("few")
        number = mark.args[0] if mark is not None else 0
        quick = {place * len(cases) // number for place in range(number)}
        for place, case in enumerate(cases):
            if place not in quick:
                case.add_marker(pytest.mark.slow)
