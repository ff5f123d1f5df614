"""Rows of few bits say what plain loops over all bits say."""

from __future__ import annotations

import random

import pytest

from bridle.engine.control.decision import mask_of
from bridle.structured_output.bit_rows import allowed_tokens, filled_words, is_empty


@pytest.mark.parametrize("num_words", [1, 2, 7, 1536])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 400])
def test_tokens_are_those_of_the_row(num_words: int, num_tokens: int) -> None:
    size = 32 * num_words
    tokens = sorted(random.Random(num_tokens).sample(range(size), min(num_tokens, size)))
    row = mask_of(tokens, size)
    assert allowed_tokens(row) == tokens
    assert is_empty(row) == (not tokens)


def test_more_words_than_asked_for_are_not_listed() -> None:
    row = mask_of([0, 64, 128], 256)
    assert filled_words(row, 2) is None
    found = filled_words(row, 3)
    assert found is not None and found[0].tolist() == [0, 1, 2]
