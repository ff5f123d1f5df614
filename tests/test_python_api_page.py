"""Tests that the code on the page about the Python API runs from top to bottom."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from tests.pages import blocks_of, run_programs
from tests.sources import ROOT

PAGE = ROOT / "docs" / "python-api.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names: dict[str, object] = {}
    printed = run_programs(blocks_of(PAGE.read_text(encoding="utf-8")), str(PAGE), names)
    assert "The capital of France is" in printed
    assert re.search(r"^\d\d$", printed, re.MULTILINE)  # what `Digits` allowed
    assert names["shown"]
    assert getattr(names["again"], "turns") == getattr(names["session"], "turns")  # noqa: B009
