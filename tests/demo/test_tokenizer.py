"""The shipped tokenizer: any text survives, digits stand alone, the marks are single tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bridle.demo import demo_model_path
from lab.demo.tokenizer import SPECIAL_TOKENS, VISIBLE_TOKENS, VOCAB_SIZE, train_tokenizer

TOKENIZER: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(demo_model_path())


@given(st.text())
def test_any_text_survives(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= token < VOCAB_SIZE for token in ids)


@pytest.mark.parametrize("text", ["Grüße, 世界 🦊!", "\x00\n\r\t  spaces  ", "e\u0301\u200d", "<|end|><think>"])
def test_odd_texts_survive(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_digits_are_single_tokens() -> None:
    assert TOKENIZER.tokenize("1234") == ["1", "2", "3", "4"]


@pytest.mark.parametrize("mark", [*SPECIAL_TOKENS, *VISIBLE_TOKENS])
def test_marks_are_single_tokens(mark: str) -> None:
    ids = TOKENIZER.encode(f"a{mark}b", add_special_tokens=False)
    assert len(ids) == 3
    assert TOKENIZER.convert_ids_to_tokens(ids[1]) == mark


def test_only_the_special_marks_vanish_from_decoded_text() -> None:
    ids = TOKENIZER.encode("<think>x</think><tool_call><|end|><|eos|>", add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<think>x</think><tool_call>"


def test_plain_text_begins_with_bos() -> None:
    assert TOKENIZER("Paris")["input_ids"][0] == TOKENIZER.bos_token_id
    assert len(TOKENIZER) == VOCAB_SIZE


def test_training_a_tokenizer_is_deterministic() -> None:
    first, second = train_tokenizer(3, 300), train_tokenizer(3, 300)
    assert first.get_vocab() == second.get_vocab()
    assert first.get_vocab() != train_tokenizer(4, 300).get_vocab()
