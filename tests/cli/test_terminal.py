"""Tests that foreign text cannot control a terminal; pipes get it unchanged."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.cli.run_report import RunReport
from bridle.cli.terminal import harmless

HOSTILE = "a\x1b]0;title\x07\x9b2Jb\tc\nd"


@given(st.text())
def test_text_cannot_steer_the_terminal(text: str) -> None:
    assert all(char in "\n\t" or char.isprintable() or ord(char) >= 160 for char in harmless(text))
    assert not set("\n\t\x1b") & set(harmless(text, on_one_line=True))
    assert len(harmless(text)) == len(text)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_run_is_harmless_on_a_terminal(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    report = RunReport({}, level=1)
    report.add({"forks": [{"index": 0, "text": HOSTILE, "logs": ""}]})
    report.print_end()
    expected = "a\ufffd]0;title\ufffd\ufffd2Jb\tc\nd" if is_terminal else HOSTILE
    assert capsys.readouterr().out == expected + "\n"
