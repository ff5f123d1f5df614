"""Tests that truncated texts and pairs of texts give the same tokens as transformers' tokenizers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from bridle.errors import InvalidRequest
from bridle.tokenizer import Tokenizer
from tests.conftest import examples
from tests.fakes.encoder_checkpoints import save_tokenizer
from tests.leftovers import kept_folder


@cache
def tokenizers() -> tuple[Tokenizer, Any]:
    folder = kept_folder("bridle-pairs-")
    save_tokenizer(folder)
    return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


TEXTS = st.text("ab the\u00e4\U0001f600", max_size=12)
SOME = TEXTS.filter(bool)  # without a second text the library sees none


@settings(max_examples=examples(60), deadline=None)
@given(text=TEXTS, limit=st.integers(3, 20))
def test_a_text_is_cut_at_its_end(text: str, limit: int) -> None:
    ours, theirs = tokenizers()
    assert ours.encode_cut(text, limit) == theirs(text, truncation=True, max_length=limit).input_ids
    assert ours.encode_cut(text) == theirs(text).input_ids == ours.encode(text)


@settings(max_examples=examples(60), deadline=None)
@given(first=SOME, second=SOME, limit=st.integers(4, 24))
def test_of_a_pair_the_longer_text_is_cut_first(first: str, second: str, limit: int) -> None:
    ours, theirs = tokenizers()
    for most in (None, limit):
        cut = {} if most is None else {"truncation": "longest_first", "max_length": most}
        want = theirs(first, second, return_token_type_ids=True, **cut)
        found = ours.encode_pair(first, second, most)
        assert found == list(zip(want.input_ids, want.token_type_ids, strict=True))


def test_half_a_character_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        tokenizers()[0].encode_pair("a", "\ud800")
