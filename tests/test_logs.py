"""Tests of the logs of a program that uses bridle as a library."""

from __future__ import annotations

import pytest
import structlog

from bridle.logs import hide_variables


def fail_with(secret: str) -> None:
    try:
        raise ValueError("no reason")
    except ValueError:
        structlog.get_logger("bridle").exception("failed")


def test_tracebacks_do_not_show_variables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    usual = structlog.get_config()["processors"][-1]
    monkeypatch.setattr(usual, "exception_formatter", structlog.dev.default_exception_formatter)  # as for programs
    hide_variables()
    fail_with("a prompt")
    out = capsys.readouterr().out
    assert "ValueError: no reason" in out and "a prompt" not in out.replace('fail_with("a prompt")', "")


def test_what_the_program_has_configured_stays() -> None:
    processors = [structlog.processors.JSONRenderer()]
    structlog.configure(processors=processors)
    hide_variables()
    assert structlog.get_config()["processors"] == processors


def test_a_model_in_the_process_hides_them() -> None:
    from bridle import LLM

    with LLM("demo", num_blocks=64):
        assert structlog.is_configured()
