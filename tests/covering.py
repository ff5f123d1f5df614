"""A few of all combinations, for tests of which each combination takes long."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def covering(*axes: Iterable[Any]) -> list[Any]:
    """All combinations of the axes' values, for `parametrize`. As many of them as the longest axis has values always
    run, and have each value of each axis; `make test-all` runs the others, too."""
    values = [list(axis) for axis in axes]
    always = {tuple(number % len(axis) for axis in values) for number in range(max(map(len, values)))}
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(values, places, strict=True)),
            marks=() if places in always else pytest.mark.slow,
        )
        for places in product(*(range(len(axis)) for axis in values))
    ]
