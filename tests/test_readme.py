"""What the README shows is run as it stands: its programs, its requests, its commands."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bridle.cli.app import app
from tests.sources import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SERVED_AT = "http://127.0.0.1:8080"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


PROGRAMS = blocks("python")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a `bridle serve` with the demo model, in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "bridle", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        assert process.stdout is not None
        lines = iter(process.stdout)
        address = next(found for line in lines if (found := re.search(r"http://[\d.]+:\d+", line)))
        yield address[0]
        process.send_signal(signal.SIGTERM)
        process.stdout.read()


@pytest.mark.parametrize(
    "number", [n for n, text in enumerate(PROGRAMS) if "openai" not in text and "YesOrNo" not in text]
)
def test_programs_run(number: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAMS[number]], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_steered_answer_is_one_of_the_words() -> None:
    (program,) = [text for text in PROGRAMS if "YesOrNo" in text]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() in ("Yes", "No")


def test_openai_program_runs(server: str) -> None:
    (program,) = [text for text in PROGRAMS if "openai" in text]
    assert SERVED_AT in program
    code = program.replace(SERVED_AT, server)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_line_streams(server: str) -> None:
    (command,) = [text for text in blocks("sh") if "curl" in text]
    assert SERVED_AT in command
    done = subprocess.run(["sh", "-c", command.replace(SERVED_AT, server)], capture_output=True, text=True, check=True)
    events = [line for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert len(events) > 3
    assert events[-1] == "data: [DONE]"


def test_commands_exist() -> None:
    verbs = set(re.findall(r"^bridle ([\w-]+)", "\n".join(blocks("sh")), re.MULTILINE))
    assert verbs
    assert all(verb in app for verb in verbs)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"\bmake ([a-z-]+)", README))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"serve", "test", "check"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets - {"and"})


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
