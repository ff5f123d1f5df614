"""Tests that loading fails or logs a warning if tokenizer and model have different numbers of tokens."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from safetensors.torch import load_file, save_file

from bridle import LLM, Regex, SamplingParams
from bridle.config import ModelConfig
from bridle.errors import InvalidRequest, UnsupportedModel
from bridle.launch.launcher import launch_shard
from bridle.serving import LoadedModel, load_model
from bridle.serving.models.export import quantize_model
from bridle.serving.models.vocab_checks import check_sizes
from bridle.tokenizer import Tokenizer
from tests.fakes import tiny_checkpoints
from tests.http.harness import local_client

NUM_TOKENS = 269  # of the tiny tokenizer
GAPS = (40, 41, 77, 262, 263, 264, 265, 266, 267)  # two bytes, another one, and all words but one


def tokenizer_of(folder: Path, *added: str) -> Tokenizer:
    tiny_checkpoints.save_tokenizer(folder)
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
    with pytest.raises(UnsupportedModel, match="has 269 token ids, but the model 'm' has 267"):
        check_sizes(tokenizer, NUM_TOKENS - 2, "m")


def test_added_tokens_without_a_place_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tokenizer_of(tmp_path, "<a>", "<b>")
    check_sizes(tokenizer, NUM_TOKENS + 2, "m")
    assert not caplog.records
    check_sizes(tokenizer, NUM_TOKENS + 1, "m")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "has 271 token ids, but the model has 270. The model never writes the 1 added tokens" in record.getMessage()
    assert "<b>" in record.getMessage()


def test_ids_without_a_token_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="bridle")
    check_sizes(tokenizer_of(tmp_path), tiny_checkpoints.VOCAB_SIZE, "m")
    assert "the model has 300 token ids, but the tokenizer has 269. The 31 further ids have no text" in caplog.text


def with_gaps(folder: Path) -> Path:
    """Remove some tokens from the folder's tokenizer, and keep their ids unused."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary, gone = content["model"]["vocab"], set(GAPS)
    content["model"]["vocab"] = {piece: token for piece, token in vocabulary.items() if token not in gone}
    content["model"]["merges"] = content["model"]["merges"][-1:]
    path.write_text(json.dumps(content))
    return folder


def test_gaps_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="bridle")
    tokenizer_of(tmp_path)
    check_sizes(Tokenizer.load(with_gaps(tmp_path)), NUM_TOKENS, "m")
    assert f"{len(GAPS)} ids (40, 41, 77). These ids have no text" in caplog.text


def test_a_piece_that_two_ids_have_is_no_gap() -> None:
    pieces = [("<unk>", 0.0), ("a", -1.0), ("b", -2.0), ("a", -3.0)]
    tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0)))
    assert tokenizer.without_token(6) == [4, 5]


def test_a_model_with_another_tokenizer_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    small = tiny_checkpoints.make_checkpoint("llama", tmp_path / "small", vocab_size=200)
    (small / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UnsupportedModel, match=r"has 269 token ids, but the model .* has 200"):
        LLM(str(small))


def test_a_prompt_with_an_added_token_too_many_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_checkpoint("llama", tmp_path / "model", vocab_size=NUM_TOKENS)
    config = (folder / "config.json").read_text()
    tokenizer_of(folder, "<a>")
    (folder / "config.json").write_text(config)
    with LLM(str(folder), num_blocks=8, warm_up=False, max_model_len=64) as llm:
        assert llm.generate("ab", SamplingParams(max_tokens=2))[0].outputs[0].error is None
        with pytest.raises(InvalidRequest, match="holds token 269; the vocabulary has 269"):
            llm.generate("a <a> b", SamplingParams(max_tokens=2))


def eager_checkpoint(folder: Path) -> Path:
    """Write a checkpoint of a model that prefers token ids without a token."""
    path = with_gaps(tiny_checkpoints.make_checkpoint("llama", folder))
    weights = load_file(path / "model.safetensors")
    head = weights["lm_head.weight"]  # [300, hidden]
    gone = [*GAPS, *range(NUM_TOKENS, tiny_checkpoints.VOCAB_SIZE)]
    head[gone] = 4 * head[100 : 100 + len(gone)]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def drawn(model: str | LoadedModel, **options: Any) -> set[int]:
    """Return the ids in outputs and candidates of greedy, sampled, speculative, grammar and beam search requests."""
    base = SamplingParams(max_tokens=24, seed=3, logprobs=20, ignore_eos=True)
    sampling = [base.with_(temperature=t, speculate=number) for t in (0.0, 2.0) for number in (0, 4)]
    sizes = {"num_blocks": 64, "warm_up": False} if isinstance(model, str) else {}
    with LLM(model, **sizes, **options) as llm:
        answers = llm.generate(["ab"] * len(sampling), sampling)
        answers += llm.generate(["ab", "cd"], base, constraint=Regex("(.|\n)*"))
        answers += llm.beam_search(["ab"], beam_width=3, max_tokens=8)
    outputs = [output for answer in answers for output in answer.outputs]
    tops = [token for output in outputs for each in output.logprobs or () if each for token, _ in each.top]
    return {token for output in outputs for token in output.token_ids} | set(tops)


def have_tokens(ids: set[int]) -> bool:
    return max(ids) < NUM_TOKENS and ids.isdisjoint(GAPS)


def test_ids_without_a_token_are_drawn_only_if_asked_for(tmp_path: Path) -> None:
    folder = str(eager_checkpoint(tmp_path / "model"))
    assert have_tokens(drawn(folder))
    others = drawn(folder, unnamed_ids=True)
    assert max(others) >= NUM_TOKENS
    assert not others.isdisjoint(GAPS)


@pytest.mark.slow
def test_nor_by_a_model_elsewhere_or_in_another_library(tmp_path: Path) -> None:
    folder = eager_checkpoint(tmp_path / "model")
    config = ModelConfig(str(folder), num_blocks=32, num_threads=1)
    elsewhere = load_model(config, executors=lambda config, *_: launch_shard(config, stands_by=False))
    assert have_tokens(drawn(elsewhere))
    pytest.importorskip("llama_cpp")
    file = quantize_model(str(folder), tmp_path / "model.gguf", "F32")
    assert have_tokens(drawn(str(file), backend="llamacpp"))
    assert max(drawn(str(file), backend="llamacpp", unnamed_ids=True)) >= NUM_TOKENS


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids"])
def test_naming_ids_without_a_token_is_refused(field: str, tmp_path: Path) -> None:
    folder = with_gaps(tiny_checkpoints.make_checkpoint("llama", tmp_path / "model"))
    with local_client(load_model(ModelConfig(str(folder), num_blocks=16, warm_up=False))) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        for token, told in ((270, "token 270; ids go from 0 to 268"), (77, "77, an id that stands for no token")):
            value: Any = {str(token): 1.0} if field == "logit_bias" else [token]
            answer = client.post("/v1/completions", json={"model": model, "prompt": "a", "max_tokens": 1, field: value})
            assert answer.status_code == 400
            assert f"{field} holds {told}" in answer.json()["error"]["message"]
