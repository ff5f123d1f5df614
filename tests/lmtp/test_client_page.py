"""Tests that the programs of docs/lmtp-client.md run unchanged, except for the server's address."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from bridle.lmtp.server import websocket_front
from tests.http.harness import saying, scripted_model, served
from tests.sources import ROOT

PAGE = (ROOT / "docs" / "lmtp-client.md").read_text(encoding="utf-8")
PROGRAMS = [
    text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "import" in text and "lmql" not in text
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(scripted_model(name="demo", next_token=saying(", there was a fox")), fronts=[websocket_front()]) as url:
        yield url.removeprefix("http://")


@pytest.mark.parametrize("program", PROGRAMS, ids=[text.splitlines()[0] for text in PROGRAMS])
def test_a_program_of_the_page_runs(program: str, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(program.replace("localhost:8080", address), "docs/lmtp-client.md", "exec"), {})
    if "print" in program:
        log = r"\d{4}-\d\d-\d\d [\d:]{8} \[.*\n"  # the server's lines, wherever they come between the program's
        assert re.sub(log, "", capsys.readouterr().out) == ", there was a fox"


def test_the_page_shows_programs() -> None:
    assert len(PROGRAMS) == 3
