"""Tests that operations on bit rows return the results of plain loops over all bits."""

from __future__ import annotations

import random

import pytest

from bridle.engine.control.decision import mask_of
from bridle.structured_output.bit_rows import allowed_tokens, few_tokens, is_empty


@pytest.mark.parametrize("num_words", [1, 2, 7, 1536])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 400])
def test_tokens_are_those_of_the_row(num_words: int, num_tokens: int) -> None:
    size = 32 * num_words
    tokens = sorted(random.Random(num_tokens).sample(range(size), min(num_tokens, size)))
    row = mask_of(tokens, size)
    assert allowed_tokens(row) == tokens
    assert is_empty(row) == (not tokens)


@pytest.mark.parametrize("tokens", [[0, 64, 128], [0, 1, 2]])  # in words of their own, and in one
def test_more_tokens_than_asked_for_are_not_listed(tokens: list[int]) -> None:
    row = mask_of(tokens, 256)
    assert few_tokens(row, 2) is None
    assert few_tokens(row, 3) == tokens
