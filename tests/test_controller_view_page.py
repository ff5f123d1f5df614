"""Tests that the page about `view` documents exactly the members of the code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields

from bridle import Controller, Decision
from bridle.controllers.python import SequenceView
from tests.sources import ROOT

PAGE = (ROOT / "docs" / "controller-view.md").read_text(encoding="utf-8")
#: Public names that the engine alone calls.
ENGINE_ONLY = {"copy", "take_logs"}


def rows(pattern: str) -> dict[str, str]:
    """Return the table rows whose first column matches `pattern`: the first column, and the text of the second."""
    found = re.findall(rf"^\| `{pattern}` \| `?(.*?)`? \|", PAGE, re.MULTILINE)
    return {name: text.replace("\\|", "|") for name, text in found}


def call(name: str, function: Callable[..., object]) -> str:
    parameters = [each for each in inspect.signature(function).parameters if each not in ("self", "cls")]
    return f"{name}({', '.join(parameters)})"


def test_members_of_the_view() -> None:
    expected = {each.name: str(each.type) for each in fields(SequenceView) if not each.name.startswith("_")}
    for name, member in vars(SequenceView).items():
        if name.startswith("_") or name in ENGINE_ONLY or name in expected:
            continue
        function = member.fget if isinstance(member, property) else member
        shown = name if isinstance(member, property) else call(name, function)
        expected[shown] = str(inspect.signature(function).return_annotation)
    assert rows(r"view\.([^`]+)") == expected
    assert all(f"`view.{name}()`" in PAGE for name in ENGINE_ONLY)


def test_decisions_and_methods() -> None:
    made = {name: member for name, member in vars(Decision).items() if isinstance(member, classmethod)}
    assert rows(r"Decision\.([^`]+)").keys() == {call(name, member.__func__) for name, member in made.items()}
    methods = {name: member for name, member in vars(Controller).items() if inspect.isfunction(member)}
    assert rows(r"(\w+\(\w+\))").keys() == {call(name, member) for name, member in methods.items()}
