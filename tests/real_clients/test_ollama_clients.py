"""Tests of Ollama's real clients with the demo model, and of the commands in `docs/ollama.md`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridle.config import ModelConfig
from bridle.serving import load_model
from tests.http.harness import served
from tests.real_clients.environment import foreign_node, foreign_python, run_in_node, run_script
from tests.sources import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    with served(load_model(ModelConfig("demo"))) as url:
        yield url


def test_in_python(demo: str) -> None:
    source = (HERE / "script_ollama.py").read_text()
    printed = run_script(foreign_python("ollama==0.6.2"), HERE / "script_ollama.py", demo)
    assert printed.count(" ok\n") == source.count("\ndef check_") > 0


def test_in_javascript(demo: str) -> None:
    source = (HERE / "script_ollama.cjs").read_text()
    printed = run_in_node(foreign_node("ollama@0.6.4"), HERE / "script_ollama.cjs", demo)
    assert printed.count(" ok\n") == source.count("\n  async ") > 0


def test_oterms_calls(demo: str) -> None:
    """The requests of oterm, a chat program for terminals, are answered as oterm's own code expects."""
    printed = run_script(foreign_python("oterm==0.26.1"), HERE / "script_oterm.py", demo)
    assert printed.endswith(" ok\n")


def test_the_page(demo: str, tmp_path: Path) -> None:
    page = (ROOT / "docs/ollama.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text(program.replace("http://127.0.0.1:8080", demo))
    assert '"city"' in run_script(foreign_python("ollama==0.6.2"), script, demo)
