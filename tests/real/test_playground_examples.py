"""Tests that each example of the playground steers SmolLM2 to the result that the example states."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from bridle.config import ModelConfig
from bridle.serving import load_model
from bridle.serving.controller_runtime import ControlSettings
from tests.http.browser import chromium, opened
from tests.http.harness import served
from tests.http.playground_kit import EXAMPLES, MARKS, run_example
from tests.real.material import model_path

pytestmark = [*MARKS, pytest.mark.timeout(1800)]
#: What the model writes where the example says which answer is the usual one.
USUAL = {
    ("JavaScript", "A capital"): "The capital of France is Paris, a city.",
    ("JSON program", "A word, used again"): "The capital of France is Paris, so Paris is in France.",
    ("Regex", "A date"): "December 25, 2024",
    ("Lark", "Greetings"): "Hello, Anna!",
}


@pytest.fixture(scope="module")
def real_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = ModelConfig(str(model_path("smollm2")), kv_memory=64 << 20)
    control = ControlSettings("on", store=tmp_path_factory.mktemp("store"))
    with served(load_model(config, control=control)) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as made:
        yield made


@pytest.mark.parametrize(("language", "example"), EXAMPLES)
def test_the_example_steers_a_real_model(browser: Any, real_url: str, language: str, example: str) -> None:
    with opened(browser, real_url) as page:
        text = run_example(page, language, example, is_message=True)
    assert re.fullmatch(EXAMPLES[language, example], text, re.DOTALL), text
    assert text == USUAL.get((language, example), text)
