"""Tests that type checkers accept a user's file with calls of `LLM`, except for the lines that are marked as wrong."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys

import pytest

from bridle import LLM, SamplingParams
from bridle.llm.options import ChatOptions, RunOptions
from bridle.structured_output.request_fields import NAMES
from tests.sources import ROOT

FILE = "tests/typing/user_file.py"
CHECKERS = {
    "mypy": (
        "--no-error-summary",
        "--hide-error-context",
        "--no-incremental",
        "--config-file",
        "tests/typing/mypy.ini",
    ),
    "basedpyright": ("--level", "error", "--pythonpath", sys.executable),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_checker_finds_the_wrong_lines_and_no_others(checker: str) -> None:
    pytest.importorskip(checker, reason=f"{checker} is not installed")
    command = [sys.executable, "-m", checker, *CHECKERS[checker], FILE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    found = re.findall(rf"{FILE}:(\d+)(?::\d+)?(?: -|:) error", done.stdout)
    lines = (ROOT / FILE).read_text("utf-8").splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert {int(number) for number in found} == wrong, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["generate", "generate_async", "stream", "chat", "chat_async", "session"])
def test_the_signature_shows_every_keyword(name: str) -> None:
    parameters = inspect.signature(getattr(LLM, name)).parameters
    chats = ChatOptions.__annotations__ if name in ("chat", "chat_async", "session") else ()
    sampling = {field.name for field in dataclasses.fields(SamplingParams)}
    assert parameters.keys() >= {*sampling, *RunOptions.__annotations__, *chats, *NAMES}
    assert all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters.values())
