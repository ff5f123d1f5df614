"""The code on the page about the Python API runs from top to bottom."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from tests.sources import ROOT

PAGE = ROOT / "docs" / "python-api.md"


def test_the_page_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
    printed = capsys.readouterr().out
    assert "The capital of France is" in printed
    assert re.search(r"^\d\d\d$", printed, re.MULTILINE)  # what `Digits` allowed
    assert names["shown"]
    assert getattr(names["again"], "turns") == getattr(names["session"], "turns")  # noqa: B009
