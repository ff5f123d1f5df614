"""`bridle bench real` alternates with llama.cpp's programs; small programs replace them here."""

from __future__ import annotations

import io
import stat
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bridle.bench import real
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.errors import EngineClosed, InvalidRequest

_SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()
        usage = {{"choices": [], "usage": {{"completion_tokens": body["max_tokens"]}}}}
        usage = json.dumps(usage, separators=(",", ":"))
        self.wfile.write(b'data: {{"choices":[]}}\\n\\ndata: ' + usage.encode() + b"\\n\\ndata: [DONE]\\n\\n")

    def log_message(self, *words):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
_BENCH = """#!{python}
print('[{{"avg_ts": 1000.0}}, {{"avg_ts": 0.5}}]')
"""


def _program(path: Path, text: str) -> Path:
    path.write_text(text.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def settings(tmp_path: Path) -> BenchSettings:
    server, bench = _program(tmp_path / "llama-server", _SERVER), _program(tmp_path / "llama-bench", _BENCH)
    return BenchSettings(quick=True, models=("demo",), llama_server=server, llama_bench=bench)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_comparison_is_a_row(settings: BenchSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "FIRST_ID", 10)
    monkeypatch.setattr(real, "NUM_IDS", 100)
    guesses = real.guesses(settings, MachineLimits(1e9, 1e9))
    console = Console(file=io.StringIO(), width=160)
    rows = real.measure(settings, console, Phases(guesses, console))["rows"]
    assert list(guesses) == ["demo, start", "demo, speed"]
    assert [row["measured"] for row in rows] == ["start, s", "prompt of 128", "1 at once", "4 at once", "16 at once"]
    assert all(row["bridle"] > 0 and row["llama_server"] > 0 for row in rows)
    assert [row["llama_bench"] for row in rows] == [None, 1000.0, 0.5, None, None]
    assert "16 at once" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_ratio_is_to_the_faster_peer() -> None:
    rates = real.Rates()
    for server, values in (("bridle", [9.0, 30.0, 12.0]), ("llama-server", [4.0]), ("llama-bench", [6.0])):
        for value in values:
            rates.note(server, value)
    row = rates.row("m", "1 at once", 1.1)
    assert (row.bridle, row.llama_server, row.llama_bench, row.ratio) == (12.0, 4.0, 6.0, 2.0)


def test_programs_that_are_missing_are_named(settings: BenchSettings, tmp_path: Path) -> None:
    limits = MachineLimits(1e9, 1e9)
    with pytest.raises(InvalidRequest, match="set --llama-server to its path"):
        real.guesses(BenchSettings(models=("demo",)), limits)
    with pytest.raises(InvalidRequest, match="set --llama-bench to its path"):
        real.guesses(
            BenchSettings(models=("demo",), llama_server=settings.llama_server, llama_bench=tmp_path / "none"), limits
        )
    broken = _program(tmp_path / "broken", "#!{python}\nraise SystemExit('no such model')\n")
    with pytest.raises(EngineClosed, match="no such model"):
        real.run_llama_bench("demo", 8, 8, BenchSettings(llama_bench=broken))
