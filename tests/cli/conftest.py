"""Commands see the variables that each test sets, and none that are meant for the tests themselves; what a user
types is a list of lines."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_variables_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BRIDLE_FULL", "BRIDLE_PROFILE", "BRIDLE_LMQL_ENV", "BRIDLE_LOSSES", "BRIDLE_STREAMS"):
        if name in os.environ:
            monkeypatch.delenv(name)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Lines that the user types; the end of the list is the end of the input."""
    typed: list[str] = []

    def read(*_: object) -> str:
        if not typed:
            raise EOFError
        return typed.pop(0)

    monkeypatch.setattr("rich.console.Console.input", read)
    yield typed
    assert not typed, "not all lines were read"


@pytest.fixture(autouse=True)
def _no_hub_and_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that only read their settings do not query the hub about models, download none, and try no port.
    `test_preflight.py` tests both in separate processes."""
    monkeypatch.setattr("bridle.model.hub_lookup.ask_hub", lambda *_: None)
    monkeypatch.setattr("bridle.http.server.listening.try_address", lambda *_: None)
    for command in ("serve", "chat"):
        monkeypatch.setattr(f"bridle.cli.{command}.default_model", lambda: "demo")
