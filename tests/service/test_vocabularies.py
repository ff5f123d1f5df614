"""A tokenizer and a model that count different tokens: refused, or told, when they are loaded."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from bridle import LLM, SamplingParams
from bridle.errors import InvalidRequest, UnsupportedModel
from bridle.service.vocabularies import check_sizes
from bridle.text import Tokenizer
from lab.doubles import tiny

NUM_TOKENS = 269  # of the tiny tokenizer


def tokenizer_of(folder: Path, *added: str) -> Tokenizer:
    tiny.save_tokenizer(folder)
    if added:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text())
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        content["added_tokens"] += [{"id": NUM_TOKENS + i, "content": text} | plain for i, text in enumerate(added)]
        path.write_text(json.dumps(content))
    (folder / "config.json").write_text("{}")
    return Tokenizer.load(folder)


def test_ordinary_tokens_without_a_place_are_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    assert tokenizer.vocab_size == NUM_TOKENS
    check_sizes(tokenizer, NUM_TOKENS, "m")
    with pytest.raises(UnsupportedModel, match="has 269 ids, and the model 'm' only 267: it has no place for 2 ord"):
        check_sizes(tokenizer, NUM_TOKENS - 2, "m")


def test_added_tokens_without_a_place_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tokenizer_of(tmp_path, "<a>", "<b>")
    check_sizes(tokenizer, NUM_TOKENS + 2, "m")
    assert not caplog.records
    check_sizes(tokenizer, NUM_TOKENS + 1, "m")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "has 271 ids, and the model 270: a prompt that holds one of the 1 added tokens" in record.getMessage()
    assert "<b>" in record.getMessage()


def test_ids_without_a_token_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="bridle")
    check_sizes(tokenizer_of(tmp_path), tiny.VOCAB_SIZE, "m")
    assert "the model has 300 ids, and the tokenizer 269: the 31 further ones stand for nothing" in caplog.text


def test_a_model_with_another_tokenizer_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    small = tiny.make_checkpoint("llama", tmp_path / "small", vocab_size=200)
    (small / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UnsupportedModel, match=r"has 269 ids, and the model .* only 200"):
        LLM(str(small))


def test_a_prompt_with_an_added_token_too_many_is_refused(tmp_path: Path) -> None:
    folder = tiny.make_checkpoint("llama", tmp_path / "model", vocab_size=NUM_TOKENS)
    config = (folder / "config.json").read_text()
    tokenizer_of(folder, "<a>")
    (folder / "config.json").write_text(config)
    with LLM(str(folder), num_blocks=8, warm_up=False, max_model_len=64) as llm:
        assert llm.generate("ab", SamplingParams(max_tokens=2))[0].outputs[0].error is None
        with pytest.raises(InvalidRequest, match="holds token 269; the vocabulary has 269"):
            llm.generate("a <a> b", SamplingParams(max_tokens=2))
