"""`bridle bench load` starts servers, measures them from outside and ends them."""

from __future__ import annotations

import io
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from bridle.bench import load
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.errors import EngineClosed, InvalidRequest

#: A server of no model, as llama.cpp's is called.
_PEER = """#!{python}
import json, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        until = time.process_time() + {work}
        while time.process_time() < until:
            pass
        self.send_response(200 if asked["max_tokens"] == 1 and self.path in {paths} else 400)
        self.end_headers()

assert sys.argv[1] == "-m" and sys.argv[-2] == "--port"
HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""
_BROKEN = "#!{python}\nraise SystemExit('it does not start')\n"


def _program(path: Path, text: str, work: float = 0.0, paths: Sequence[str] = ("/v1/chat/completions",)) -> Path:
    """A peer that computes for `work` seconds before it answers a request to one of `paths`."""
    path.write_text(text.format(python=sys.executable, work=work, paths=list(paths)))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_start_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_real: bool) -> None:
    monkeypatch.setattr(load, "IDLE_SECONDS", {True: 0.1})
    peer = _program(tmp_path / "llama-server", _PEER)
    if not is_real:
        monkeypatch.setattr(sys, "executable", str(peer))  # it stands for `bridle serve`, too
    settings = BenchSettings(quick=True, models=("demo",), llama_server=peer)
    guesses = load.guesses(settings, MachineLimits(1e9, 1e9))
    console = Console(file=io.StringIO(), width=160)
    rows = load.measure(settings, console, Phases(guesses, console))["rows"]
    assert [(row["model"], row["server"]) for row in rows] == [
        ("demo", "first"),
        ("demo", "again"),
        ("demo", "llama-server"),
    ]
    assert list(guesses) == ["demo, first", "demo, again", "demo, llama-server"]
    for row in rows:
        assert row["first_token_seconds"] >= row["seconds"] > 0
        assert row["cpu_seconds"] >= 0 and row["peak_mb"] > 0 and row["memory_mb"] > 0
    assert not is_real or rows[0]["peak_mb"] > rows[2]["peak_mb"], "of the process that serves"
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "s to /health" in printed and "s to 1st token" in printed


@pytest.mark.few(1)
@pytest.mark.parametrize("paths", [("/v1/chat/completions",), ("/v1/completions",)], ids=str)
def test_work_before_the_first_answer_counts_and_the_idle_server_is_measured_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: Sequence[str]
) -> None:
    monkeypatch.setattr(load, "IDLE_SECONDS", {True: 0.1})
    settings = BenchSettings(quick=True, llama_server=_program(tmp_path / "peer", _PEER, 0.3, paths))
    row = load.start("demo", "llama-server", tmp_path, settings)
    assert row.first_token_seconds >= row.seconds + 0.29
    assert row.idle_percent < 50


def test_a_server_that_refuses_the_first_request_is_told(tmp_path: Path) -> None:
    settings = BenchSettings(quick=True, llama_server=_program(tmp_path / "peer", _PEER, paths=()))
    with pytest.raises(EngineClosed, match="one token"):
        load.start("demo", "llama-server", tmp_path, settings)


def test_a_server_that_does_not_start_is_told(tmp_path: Path) -> None:
    settings = BenchSettings(quick=True, models=("demo",), llama_server=_program(tmp_path / "peer", _BROKEN))
    with pytest.raises(EngineClosed, match="it does not start"):
        load.start("demo", "llama-server", tmp_path, settings)


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="needs a model"):
        load.models(BenchSettings())
    with pytest.raises(InvalidRequest, match="there is no such file"):
        load.models(BenchSettings(models=("demo",), llama_server=tmp_path / "nothing"))
