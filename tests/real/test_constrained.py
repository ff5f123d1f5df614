"""Constraints on a real model: what they allow is also what the model means."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bridle import LLM
from bridle.structured_output import Gbnf, Regex
from tests.real.material import model_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ITALY = [{"role": "user", "content": "What is the capital of Italy?"}]


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LLM]:
    with LLM(str(model_path("smollm2")), max_model_len=512) as loaded:
        yield loaded


@pytest.mark.parametrize("form", [Regex("(Paris|Rome|Madrid)"), Gbnf('root ::= "Paris" | "Rome" | "Madrid"')])
def test_a_forced_ending_counts_when_its_beginning_is_chosen(smollm2: LLM, form: Regex | Gbnf) -> None:
    for lookahead, answer in ((0, "Paris"), (8, "Rome")):
        asked = smollm2.chat(ITALY, constraint=form, lookahead=lookahead, temperature=0.0, max_tokens=8)
        assert asked[0].text == answer
