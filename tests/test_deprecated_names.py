"""Tests that every old name keeps its meaning for one release, and that no current name is listed as old."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from bridle.deprecated_names import MODULES, NAMES, new_module
from tests.sources import modules

EXPORTS = [(module, old, new) for module, names in NAMES.items() for old, new in names.items()]


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if new_module(name) is not None:
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(("old", "new"), MODULES.items())
def test_an_old_module_is_the_new_one(old: str, new: str) -> None:
    assert old not in modules() and new in modules()
    with pytest.warns(DeprecationWarning, match=f"{old} is called {new} now"):
        module = import_module(old)
    assert module is import_module(new)
    assert module.__name__ == new and module.__spec__ is not None and module.__spec__.name == new


def test_what_lies_in_an_old_package_is_found() -> None:
    with pytest.warns(DeprecationWarning, match="called bridle.structured_output.spec now"):
        module = import_module("bridle.constraints.spec")
    assert module is import_module("bridle.structured_output.spec")


def test_what_never_was_is_not_found() -> None:
    with pytest.warns(DeprecationWarning, match="called bridle.serving now"), pytest.raises(ModuleNotFoundError):
        import_module("bridle.service.nothing")


@pytest.mark.parametrize(("module", "old", "new"), EXPORTS)
def test_an_old_export_is_the_new_one(module: str, old: str, new: str) -> None:
    home = import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{old} is called {new} now"):
        assert getattr(home, old) is getattr(home, new)
    assert new in vars(home) and old not in vars(home)


@pytest.mark.parametrize("module", NAMES)
def test_other_names_are_attribute_errors(module: str) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        import_module(module).Nothing  # noqa: B018
