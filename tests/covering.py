"""Selections of cases for slow tests. `make test-all` also runs the cases that are not selected."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def covering(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of the axes' values, for `parametrize`. A few combinations, in which each value occurs,
    are not marked as slow."""
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
    """Return all cases, and mark those that are not in `quick` as slow. `quick` has one case for each kind of code."""
    found = [each if each in quick else pytest.param(each, marks=pytest.mark.slow) for each in cases]
    assert len(quick) == sum(isinstance(each, str) for each in found)
    return found


def mark_the_rest(items: Iterable[pytest.Item]) -> None:
    """For each test with the mark `few(number)`, keep that number of cases, and mark its other cases as slow."""
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
