"""A flag's help is the one string below it; what a second string says would be lost."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

import pytest

from tests.sources import PACKAGE, tree


def is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


@pytest.mark.parametrize("path", sorted((PACKAGE / "cli").glob("*.py")), ids=lambda path: path.stem)
def test_no_help_is_cut_off(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ClassDef):
            cut = [second.lineno for first, second in pairwise(node.body) if is_text(first) and is_text(second)]
            assert not cut, f"{path.name}: put the strings of line {cut[0]} and before into one pair of parentheses"
