"""Choices on SmolLM2-135M-Instruct, which a mask on the first token misleads. `BRIDLE_SMOLLM2` names its GGUF file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bridle import LLM
from bridle.structured_output import Regex

MODEL = Path(os.environ.get("BRIDLE_SMOLLM2") or os.devnull)


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.is_file(), reason="BRIDLE_SMOLLM2 names no file")
def test_the_capital_of_italy_is_rome() -> None:
    asked = [{"role": "user", "content": "What is the capital of Italy?"}]
    cities = ["Paris", "Rome", "Madrid"]
    with LLM(str(MODEL)) as llm:
        result = llm.decide(asked, cities)
        assert result.choice == max(cities, key=lambda city: result.probabilities[city]) == "Rome"
        assert llm.chat(asked, choice=cities, temperature=0.0)[0].text == "Rome"
        many = [f"{city} {number}" for city in cities for number in range(340)]
        assert sum(llm.decide(asked, many).probabilities.values()) == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.is_file(), reason="BRIDLE_SMOLLM2 names no file")
@pytest.mark.parametrize("canonical", ["off", "prefer", "strict"])
def test_a_word_that_a_pattern_allows_is_a_word(canonical: str) -> None:
    with LLM(str(MODEL), max_model_len=512) as llm:
        for constraint in (Regex(" [a-z]+"), Regex(" (fruit|vegetable|animal)")):
            (output,) = llm.generate(
                "An apple is a kind of", constraint=constraint, temperature=0.0, canonical=canonical, use_tqdm=False
            )
            assert output.text == " fruit"
