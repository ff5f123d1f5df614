"""Tests of frameworks and JavaScript clients, unmodified, with the demo model. Each test runs a script, which prints
its checks and fails if one does not hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bridle.config import ModelConfig
from bridle.serving import load_model
from tests.http.harness import served
from tests.real_clients.environment import PYTHON, foreign_node, foreign_python, run_in_node, run_script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HERE = Path(__file__).parent
ZOD = "zod@4.6.7"
NODE = {
    "script_ai_sdk.cjs": (
        "ai@6.0.326", "@ai-sdk/openai-compatible@2.0.91", "@ai-sdk/openai@3.0.141", "@ai-sdk/anthropic@3.0.139", ZOD,
    ),
    "script_javascript.cjs": ("openai@6.49.0", "@anthropic-ai/sdk@1.12.0", "@huggingface/inference@4.13.30", ZOD),
}  # fmt: skip


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    with served(load_model(ModelConfig("demo"))) as url:
        yield url


@pytest.mark.parametrize("script", PYTHON)
def test_in_python(demo: str, script: str) -> None:
    source = (HERE / script).read_text()
    printed = run_script(foreign_python(*PYTHON[script]), HERE / script, demo)
    assert printed.count(" ok\n") == source.count("def check_") > 0


@pytest.mark.parametrize("script", NODE)
def test_in_javascript(demo: str, script: str) -> None:
    source = (HERE / script).read_text()
    printed = run_in_node(foreign_node(*NODE[script]), HERE / script, demo)
    assert printed.count(" ok\n") == source.count("\n  async ") > 0
