"""Tests that the list of names for `from bridle import X` is sorted, complete and right."""

from __future__ import annotations

import ast
import importlib

import pytest

import bridle
from tests.sources import PACKAGE, ROOT, tree


def test_every_member_exists() -> None:
    for name in bridle.__all__:
        member, home = getattr(bridle, name), bridle.HOME_OF.get(name)
        assert home or name == "__version__"
        assert not home or member is getattr(importlib.import_module(home), name), name


def test_all_is_sorted_and_complete() -> None:
    assert list(bridle.__all__) == sorted(bridle.__all__)
    assert set(bridle.__all__) == {*bridle.HOME_OF, "__version__"}
    assert dir(bridle) == bridle.__all__


def test_type_checkers_see_the_same_names() -> None:
    seen: dict[str, str] = {}
    for node in ast.walk(tree(PACKAGE / "__init__.py")):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bridle."):
            seen |= {alias.name: node.module or "" for alias in node.names}
    assert seen == bridle.HOME_OF


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Bridel'"):
        bridle.Bridel  # noqa: B018


def test_version_and_type_marker_are_shipped() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert f"[{bridle.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
