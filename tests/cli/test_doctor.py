"""The doctor finds what is wrong and survives it."""

from __future__ import annotations

import socket

import pytest

from bridle.cli import doctor


def test_busy_port_is_noted() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        findings = {finding.subject: finding for finding in doctor.examine(port)}
    assert findings["port"].level == "note"
    assert str(port) in findings["port"].text
    assert "--port" in findings["port"].advice


def test_broken_probe_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def _memory() -> None:
        raise OSError("no /proc here")

    monkeypatch.setattr(doctor, "_memory", _memory)
    findings = {finding.subject: finding for finding in doctor.examine(0)}
    assert findings["memory"].level == "problem"
    assert findings["memory"].text == "OSError: no /proc here"
    assert findings["port"].level == "ok"


def test_problem_sets_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine", lambda _: [doctor.Finding("problem", "disk", "full", "make room")])
    assert doctor.doctor() == 1
    shown = capsys.readouterr().out
    assert "problem disk: full" in shown
    assert "make room" in shown


def test_missing_packages_of_the_control_runtime_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.service.control.find_spec", lambda name: None)
    findings = {finding.subject: finding for finding in doctor.examine(0)}
    assert findings["controllers"].level == "note"
    assert "pip install 'bridle[aici]'" in findings["controllers"].advice
