"""Cases of the recipe `vote`: word problems like those of `calculator`. Their numbers have one or two digits, so that a
small model is often right."""

from __future__ import annotations

from dev.recipes.calculator import case_of, is_right
from dev.recipes.recipe import Case, Recipe


def cases(count: int, seed: int) -> list[Case]:
    """Return `count` cases, each with its own seed."""
    return [case_of(f"{seed}-vote-{number}", 3, 20) for number in range(count)]


RECIPE = Recipe("vote.js", 80, cases, is_right)
