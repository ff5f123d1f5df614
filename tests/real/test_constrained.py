"""Tests that constrained answers of a real model are valid, and right where the model knows the answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bridle import LLM
from bridle.structured_output import Gbnf, Regex, vocabulary_of
from dev.bench.choices import compare
from tests.real.material import WRITERS, model_path
from tests.sources import ROOT
from tests.structured_output.kit import ODD, forbidden_pairs

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


def test_the_capital_of_italy_is_rome(smollm2: LLM) -> None:
    cities = ["Paris", "Rome", "Madrid"]
    result = smollm2.decide(ITALY, cities)
    assert result.choice == max(cities, key=lambda city: result.probabilities[city]) == "Rome"
    assert smollm2.chat(ITALY, choice=cities, temperature=0.0)[0].text == "Rome"
    many = [f"{city} {number}" for city in cities for number in range(340)]
    assert sum(smollm2.decide(ITALY, many).probabilities.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("canonical", ["off", "prefer", "strict"])
@pytest.mark.parametrize("pattern", [" [a-z]+", " (fruit|vegetable|animal)"])
def test_a_word_that_a_pattern_allows_is_a_word(smollm2: LLM, pattern: str, canonical: str) -> None:
    (output,) = smollm2.generate(
        "An apple is a kind of", constraint=Regex(pattern), temperature=0.0, canonical=canonical, use_tqdm=False
    )
    assert output.text == " fruit"


def test_choices_are_what_exact_scores_find_best() -> None:
    found = compare(str(model_path("smollm2")))
    print(found)  # with the share of masks
    assert found["questions"] == found["agree"]["scored"] == 200 > found["agree"]["masked"]


@pytest.mark.parametrize("name", WRITERS)
def test_canonical_masks_forbid_nothing_that_the_tokenizer_writes(name: str) -> None:
    with LLM(str(model_path(name)), max_model_len=512) as llm:
        vocab = vocabulary_of(llm.tokenizer, llm.tokenizer.vocab_size)
        pages = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "bridle" / "engine").glob("*.py"))]
        for text in (ODD, *(page.read_text(encoding="utf-8") for page in pages)):
            assert forbidden_pairs(vocab, text) == []
