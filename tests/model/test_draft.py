"""Tests of a model with a draft model: both load within one memory budget, and the text equals that of the model
alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bridle import LLM
from bridle.config import ModelConfig
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.launch.launcher import launch_shard
from bridle.model import load_executor
from bridle.model.executor import LocalExecutor
from bridle.model.kv_cache import KVCache
from bridle.sampling import SamplingParams
from tests.fakes.tiny_checkpoints import cached_checkpoint

PROMPTS = ["a quick brown fox", "jumps over", "the lazy dog"]


def sampling(**fields: object) -> list[SamplingParams]:
    common = {"max_tokens": 24, "ignore_eos": True, "speculate": 4, **fields}
    return [SamplingParams(seed=seed, **common) for seed in range(len(PROMPTS))]  # type: ignore[arg-type]


@pytest.mark.few(1)
@pytest.mark.parametrize("quantization", ["none", "q8_0"])
@pytest.mark.usefixtures("obeyed_drafts")
def test_a_draft_model_changes_no_token(quantization: str) -> None:
    target = str(cached_checkpoint("llama"))
    smaller = str(cached_checkpoint("qwen2", seed=1, num_hidden_layers=1))
    settings = {"device": "cpu", "num_blocks": 128, "quantization": quantization}
    runs = sampling(temperature=0.0) + sampling(temperature=1.0, repetition_penalty=1.2, logprobs=2)
    with LLM(target, **settings) as llm:
        plain = llm.generate(PROMPTS * 2, [each.with_(speculate=0) for each in runs])
    with LLM(target, draft_model=smaller, **settings) as llm:
        drafted = llm.generate(PROMPTS * 2, runs)
    assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
    assert sum(each.outputs[0].usage.drafted_tokens for each in drafted) > 100


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.usefixtures("obeyed_drafts")
def test_a_draft_model_that_agrees_is_right_at_any_temperature(temperature: float) -> None:
    """A draft model equal to the model is nearly always right, as it samples with the same seed and random number."""
    path = str(cached_checkpoint("llama"))
    with LLM(path, draft_model=path, device="cpu", num_blocks=128) as llm:
        outputs = [each.outputs[0] for each in llm.generate(PROMPTS, sampling(temperature=temperature))]
    drafted = sum(output.usage.drafted_tokens for output in outputs)
    assert sum(output.usage.accepted_tokens for output in outputs) > 0.8 * drafted > 0


def kv_of(executor: LocalExecutor) -> KVCache:
    assert executor.runner is not None
    return executor.runner.attention.cache


@pytest.mark.parametrize("room", [{"kv_memory": 1 << 20}, {"kv_tokens": 512}, {"num_blocks": 16}])
def test_both_pools_hold_as_many_tokens_within_one_budget(room: dict[str, int]) -> None:
    target, smaller = cached_checkpoint("llama"), cached_checkpoint("qwen2", seed=1, num_hidden_layers=1)
    executor = load_executor(ModelConfig(str(target), draft_model=str(smaller), device="cpu", warm_up=False, **room))
    assert isinstance(executor, LocalExecutor)
    assert executor.draft is not None
    pools = [kv_of(executor), kv_of(executor.draft)]
    tokens = [pool.num_blocks * pool.block_size for pool in pools]
    assert tokens[0] == tokens[1]
    if "kv_memory" in room:
        assert room["kv_memory"] / 2 < sum(pool.num_bytes for pool in pools) <= room["kv_memory"]
    assert executor.num_bytes > executor.draft.num_bytes > 0
    executor.close()
    assert executor.num_bytes == 0


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    shutil.copytree(cached_checkpoint("qwen2", seed=1, num_hidden_layers=1), path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[20:22]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InvalidRequest, match="has another vocabulary: token"):
        LLM(str(cached_checkpoint("llama")), draft_model=str(path), device="cpu", num_blocks=64)


def test_a_model_in_shards_takes_no_draft_model() -> None:
    with pytest.raises(UnsupportedFeature, match="a draft model needs the model in this process"):
        launch_shard(ModelConfig("demo", draft_model="demo"))
