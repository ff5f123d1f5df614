"""`scripts/card-run` runs each part in a process, so that the end of one harms no other, and reports what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.utils import canonicalize_name

from scripts.card import estimates, run, wasm, wheels
from scripts.card.parts import DEEP, FIRST, Part, chosen
from tests.sources import ROOT

#: Parts by what they do, as programs.
PROGRAMS = {
    "good": "print('{\"what\": 1}'); print('noise')",
    "exits": "import os; print('{\"what\": 2}', flush=True); os._exit(3)",
    "killed": "import os, signal, sys; print('why', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGKILL)",
    "hangs": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])",
    "fell back": 'print(\'{"what": 3, "failed": "plain torch"}\')',
    "silent": "print('nothing to tell')",
    "last": "print('{\"what\": 4}')",
}


def ran(
    folder: Path, names: list[str], seconds: float = 60.0, limit: float = 40.0
) -> tuple[list[run.Outcome], list[Any]]:
    report = run.Report(folder)
    parts = [Part(name, 1.0 if name == "hangs" else limit, (sys.executable, "-c", PROGRAMS[name])) for name in names]
    outcomes = run.run_all(parts, lambda part, most: (), seconds, report, os.environ)
    report.close()
    return outcomes, [json.loads(line) for line in (folder / run.FIGURES).read_text().splitlines()]


def test_a_part_that_ends_badly_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part may call `os._exit`, be killed, or hang with a child process of its own."""
    monkeypatch.setattr(run, "LEAST", 0.5)
    outcomes, lines = ran(tmp_path, list(PROGRAMS))
    assert {each.part: each.state for each in outcomes} == {
        "good": "ok",
        "exits": "died",
        "killed": "died",
        "hangs": "late",
        "fell back": "failed",
        "silent": "failed",
        "last": "ok",
    }
    assert [line["what"] for line in lines if "what" in line] == [1, 2, 3, 4], "what was told before is kept"
    died = {line["part"]: line for line in lines if "died" in line}
    assert died["exits"]["died"] == "exit status 3"
    assert died["killed"] == {"part": "killed", "died": "signal SIGKILL", "stderr_tail": "why\n"}
    assert died["hangs"]["died"] == "ended after 1 s"
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines, "told at once, too"
    assert "noise" in (tmp_path / run.LOG).read_text()
    shown = run.table(outcomes).splitlines()
    assert len(shown) == 1 + len(outcomes)
    assert shown[5].split()[-2:] == ["plain", "torch"]


def test_parts_for_which_no_time_is_left_are_told(tmp_path: Path) -> None:
    outcomes, lines = ran(tmp_path, ["good"], seconds=4.0)
    assert [each.state for each in outcomes] == ["left out"]
    assert lines == [{"part": "good", "left_out": "no time is left"}]


def test_parts_are_chosen_by_their_names() -> None:
    names = ["smoke", "load", "laws", "attention", "8b", "0.6b", "lora", "control", "serve"]
    assert [part.name for part in FIRST] == names
    assert [part.name for part in chosen(DEEP, ["counters", "peers"])] == ["peers", "counters"]
    assert sum(part.seconds for part in DEEP) <= 570
    assert run.main(["--out", "unused", "--part", "70b"]) == 2


def make_wheel(folder: Path, code: str) -> None:
    with ZipFile(folder / "brought-1.0-py3-none-any.whl", "w") as file:
        file.writestr("brought.py", code)
        file.writestr("brought-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
        file.writestr("brought-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("brought-1.0.dist-info/RECORD", "")


def test_parts_see_wheels_that_are_brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(tmp_path, 'told = \'{"what": "brought"}\'')
    part = Part("sees", 60.0, (sys.executable, "-c", "import brought; print(brought.told)"))
    monkeypatch.setattr(run, "FIRST", (part,))
    assert run.main(["--out", str(tmp_path / "out"), "--wheels", str(tmp_path)]) == 0
    told = [json.loads(line) for line in (tmp_path / "out" / run.FIGURES).read_text().splitlines()]
    assert told == [{"part": "pip", "wheels": 1}, {"part": "sees", "what": "brought"}]
    assert run.main(["--out", str(tmp_path / "none"), "--wheels", str(tmp_path / "out")]) == 1


def test_the_parent_imports_neither_torch_nor_bridle() -> None:
    code = "import sys, scripts.card.run; print({'torch', 'bridle', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.slow  # each part imports torch; tests/card/test_measurements.py runs them in one process
@pytest.mark.timeout(900)
def test_all_parts_run_as_processes(tmp_path: Path) -> None:
    command = (sys.executable, "scripts/card-run", "--quick", "--seconds", "800", "--out", str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + (tmp_path / run.LOG).read_text()
    states = [line.split()[:2] for line in done.stdout.splitlines() if not line.startswith("{")]
    assert states == [["part", "state"], *([part.name, "ok"] for part in FIRST)]


# -- what travels -----------------------------------------------------------------------------------------------


def test_wheels_are_what_is_required_and_not_there() -> None:
    base, serve = wheels.needed(serve=False), wheels.needed(serve=True)
    assert {"cyclopts", "llguidance", "msgspec", "pytest-asyncio", "structlog"} <= set(base)
    assert {"fastapi", "httptools", "pydantic", "pydantic-core", "starlette", "uvicorn", "websockets"} <= set(serve)
    assert set(base) < set(serve)
    assert {canonicalize_name(name) for name in wasm.NEEDED} <= set(serve), "what the part `control` needs"
    assert not (set(serve) - wheels.TOO_OLD) & wheels.image()
    assert not {"torch", "transformers", "triton", "numpy"} & set(serve)


def test_checkout_and_wheels_travel_together() -> None:
    """`scripts/card-wheels` refuses more than `WHEELS` bytes, so the checkout has to leave room for them."""
    assert wheels.tree_bytes() + wheels.WHEELS <= wheels.LIMIT == 64 << 20
    assert wheels.problem(8 << 20, 40 << 20) is None
    assert "at most" in str(wheels.problem(wheels.WHEELS + 1, 0))
    assert "travel" in str(wheels.problem(8 << 20, 60 << 20))


# -- estimates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [16_384, 131_072])
def test_joining_parts_costs_a_tenth_of_attention_at_most(context: int) -> None:
    """Compare the estimated times for one row, by counted bytes and rounds."""
    times = estimates.attention(estimates.MODELS[0], 1, context, estimates.Card())
    assert times.join <= 0.1 * times.attend


def test_the_table_has_a_line_for_each_step_and_what_was_measured(tmp_path: Path) -> None:
    figures = tmp_path / "gpu.jsonl"
    told: list[dict[str, Any]] = [
        {"part": "8b", "what": "decode", "peer": "bridle", "batch": 64, "context": 1_024, "step_ms": 9.876},
        {
            "part": "8b",
            "what": "decode",
            "peer": "bridle",
            "batch": 1,
            "context": 1_024,
            "step_ms": 1.234,
            "top_p": 0.9,
        },
    ]
    figures.write_text("".join(json.dumps(line) + "\n" for line in told))
    lines = list(estimates.table(estimates.Card(), estimates.read_measured(figures)))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[4:]]
    assert len(rows) == len(estimates.MODELS) * len(estimates.ROWS) * len(estimates.CONTEXTS) == 24
    assert {row[10] for row in rows} == {"", "9.88"}
    assert all(0 < float(row[9]) <= 1 for row in rows), "no step is faster than its floor"


def test_estimates_count_the_tiles_of_the_kernel() -> None:
    source = (ROOT / "bridle/model/kernels/paged_join.py").read_text(encoding="utf-8")
    assert "FEW = tl.constexpr(8)" in source
    assert "MANY = tl.constexpr(32)" in source
    assert [estimates.join_rounds(splits) for splits in (1, 8, 9, 32, 64, 512)] == [1, 1, 1, 1, 2, 16]
