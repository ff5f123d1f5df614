"""text-generation's and huggingface_hub's clients, from the package index, against the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bridle.config import ModelConfig
from bridle.service import load_model
from tests.genuine.environment import foreign_python, run_script
from tests.http.harness import served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PACKAGES = ("text-generation==0.7.0", "huggingface_hub==0.36.2")
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    with served(load_model(ModelConfig("demo"))) as url:
        yield url


@pytest.mark.parametrize("script", ["script_text_generation.py", "script_huggingface.py"])
def test_genuine_client(demo: str, script: str) -> None:
    source = (HERE / script).read_text()
    printed = run_script(foreign_python(*PACKAGES), HERE / script, demo)
    assert printed.count(" ok\n") == source.count("\ndef check_") > 0
