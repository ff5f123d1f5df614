"""Commands see the variables that each test sets, and none that are meant for the tests themselves."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_variables_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BRIDLE_FULL", "BRIDLE_PROFILE", "BRIDLE_LMQL_ENV", "BRIDLE_LOSSES", "BRIDLE_STREAMS"):
        if name in os.environ:
            monkeypatch.delenv(name)
