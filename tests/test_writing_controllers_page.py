"""Tests the controller tutorial: its commands run one after the other, and print the output on the page."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridle import LLM
from bridle.cli import main
from bridle.cli.app import app
from bridle.serving import ControlSettings
from tests.http.controlled import lent
from tests.http.harness import served
from tests.pages import blocks_of, log_elsewhere
from tests.sources import ROOT
from tests.waiting import PATIENCE

PAGE = (ROOT / "docs" / "writing-controllers.md").read_text(encoding="utf-8")
BLOCKS = blocks_of(PAGE)
#: What the page installs is installed. A test within the test takes a while, and is another test's business.
SKIPPED = ("pip install ",) if os.environ.get("BRIDLE_FULL") else ("pip install ", "make test")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve the demo model like the page does. `python3` in `make` runs this Python."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "python3").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (programs / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    patient = ("--wasm-max-step-time", "1000", "--wasm-max-init-time", "10000")
    control = ControlSettings("on", args=(*patient, "--limit", "max_prepare_wait=600000"))
    with LLM("demo", control=control, num_blocks=512) as llm, served(lent(llm.model)) as url:
        monkeypatch.setenv("AICI_API_BASE", f"{url}/v1/")
        yield


def test_the_commands_do_what_the_page_says(
    server: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    pytest.importorskip("ziglang", reason="the C compiler is not installed")
    log_elsewhere()
    commands = [block for block in BLOCKS if block.language == "sh"]
    assert [block.output is not None for block in commands].count(True) == 2
    for block in commands:
        block.check("".join(_do(line, monkeypatch, capsys) for line in block.text.splitlines()))


def _do(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return a command's output. `bridle` commands run in this process, which saves seconds for each."""
    words = shlex.split(line)
    if line.startswith(SKIPPED):
        return ""
    if words[0] == "cd":
        monkeypatch.chdir(words[1])
        return ""
    if words[0] == "bridle":
        code = main(words[1:])
        captured = capsys.readouterr()
        assert code == 0, (line, captured.err)
        return captured.out
    done = subprocess.run(["/bin/bash", "-c", line], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout


def test_the_script_is_the_one_that_is_made(tmp_path: Path) -> None:
    assert main(["new-controller", "answer", "--lang", "js", "--into", str(tmp_path)]) == 0
    (shown,) = [block.text for block in BLOCKS if block.language == "js"]
    assert (tmp_path / "answer" / "answer.js").read_text().endswith(shown)


def test_the_module_builds_as_it_stands(tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="the C compiler is not installed")
    from dev.controllers.toolchain import SMALL, zig_cc

    (shown,) = [block.text for block in BLOCKS if block.language == "c"]
    (tmp_path / "shown.c").write_text(shown)
    zig_cc([*SMALL, "-o", tmp_path / "shown.wasm", tmp_path / "shown.c"])
    assert (tmp_path / "shown.wasm").stat().st_size < 5_000


def test_all_commands_exist() -> None:
    lines = re.findall(r"^bridle (.+?)$", PAGE, re.MULTILINE)
    lines += re.findall(r"`bridle ((?:run|new-controller|serve) [^`]+)`", PAGE)
    assert len(lines) > 8
    for line in lines:
        app.parse_args(shlex.split(line.replace("NAME", "name")), exit_on_error=False, print_error=False)


def test_the_interface_is_told_completely() -> None:
    wit = (ROOT / "bridle" / "aici" / "runtime" / "wit" / "controller.wit").read_text(encoding="utf-8")
    for export in re.findall(r"export [\w-]+: func.*;", wit):
        assert export in PAGE
    part = PAGE.split("## As a component")[1]
    for name in re.findall(r"^    ([\w-]+): func", wit, re.MULTILINE):
        known = name in part or (name.startswith("constraint-") and f"-{name.split('-', 1)[1]}`" in part)
        assert known, name
    header = (ROOT / "bridle" / "controllers" / "standard" / "include" / "bridle_steps.h").read_text(encoding="utf-8")
    for helper in set(re.findall(r"`?(bridle_[a-z_]+)\b(?!\.h)", PAGE)) - {"bridle_controller", "bridle_steps"}:
        assert helper in header or helper.startswith("bridle_constraint"), helper
