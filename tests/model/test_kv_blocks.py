"""The blocks of a real KV cache as bytes: exact, of the model that computed them, and found again after a restart."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bridle import LLM
from bridle.config import ModelConfig
from bridle.model import weights_digest
from bridle.model.executor import LocalExecutor
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.kv_blocks import CacheBlocks
from bridle.model.kv_cache import KVCache
from bridle.model.loading import load_executor
from tests.fakes.tiny_checkpoints import cached_checkpoint

PROMPT = [5 + i * i % 200 for i in range(200)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path / "cache"))


def parts_of(cache: KVCache) -> list[torch.Tensor]:
    return [part for layer in cache.layers.values() for part in layer.parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_block_comes_back_bit_by_bit_and_touches_no_other(dtype: torch.dtype) -> None:
    shapes = {0: LayerGeometry(2, 1, 8, 8, 1.0), 3: LayerGeometry(4, 2, 8, 16, 1.0)}
    first, second = (KVCache(Geometry(shapes, 10), 5, 4, dtype, torch.device("cpu")) for _ in range(2))
    for part in parts_of(first):
        part.view(torch.uint8).random_(0, 256)
    for part in parts_of(second):
        part.view(torch.uint8).zero_()
    source, target = (CacheBlocks(cache, str) for cache in (first, second))
    data = source.read_block(3)
    assert len(data) == source.block_bytes == first.num_bytes // 5
    target.write_block(1, data)
    for have, want in zip(parts_of(second), parts_of(first), strict=True):
        bits = have.view(torch.uint8)
        assert torch.equal(bits[4:8], want.view(torch.uint8)[12:16])
        assert not bits[:4].any()
        assert not bits[8:].any()


def identity(folder: Path, **settings: Any) -> str:
    executor = load_executor(ModelConfig(str(folder), num_blocks=8, warm_up=False, **settings))
    assert isinstance(executor, LocalExecutor)
    assert executor.kv_blocks is not None
    found = executor.kv_blocks.identity()
    executor.close()
    return found


def test_the_identity_follows_weights_and_all_that_changes_their_kv(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(cached_checkpoint("llama"), tmp_path / "llama"))
    plain = identity(folder)
    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert identity(moved) == identity(folder) == plain
    others = [
        identity(folder, **settings)
        for settings in ({"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"block_size": 8}, {"max_model_len": 64})
    ]
    (weights,) = folder.glob("*.safetensors")
    state, content = weights.stat(), bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns))  # as a copy does that keeps times
    assert len({plain, identity(folder), *others}) == 6


def test_weights_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cached_checkpoint("llama")
    found = weights_digest.weights_digest(folder)
    monkeypatch.setattr(weights_digest, "digest_piece", None)
    assert weights_digest.weights_digest(folder) == found


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "bfloat16"}], ids=str)
def test_after_a_restart_a_conversation_computes_only_new_tokens(tmp_path: Path, settings: dict[str, Any]) -> None:
    with LLM("demo", max_batch_total_tokens=1024, **settings) as llm:
        (want,) = llm.generate([PROMPT], max_tokens=20, temperature=0, ignore_eos=True)
    store = {"kv_store": str(tmp_path / "kv"), "max_batch_total_tokens": 1024, **settings}
    with LLM("demo", **store) as llm:
        (first,) = llm.generate([PROMPT], max_tokens=20, temperature=0, ignore_eos=True)
    assert first.outputs[0].token_ids == want.outputs[0].token_ids
    with LLM("demo", **store) as llm:
        (second,) = llm.generate([PROMPT], max_tokens=20, temperature=0, ignore_eos=True)
        assert second.outputs[0].token_ids == want.outputs[0].token_ids
        assert second.usage.cached_tokens == len(PROMPT) // 16 * 16
        (third,) = llm.generate([[*PROMPT, *second.outputs[0].token_ids, 7]], max_tokens=1)
        assert third.usage.cached_tokens == (len(PROMPT) + 19) // 16 * 16
        statistics = llm.statistics()
        assert statistics.num_restored_tokens == second.usage.cached_tokens
        assert statistics.num_restored_bytes == statistics.num_restored_tokens // 16 * llm.info.block_bytes


def test_a_cache_that_is_too_small_for_two_conversations_keeps_both(tmp_path: Path) -> None:
    prompts = [PROMPT, [token + 1 for token in PROMPT]]
    with LLM("demo", kv_store=str(tmp_path / "kv"), kv_store_bytes=64 << 20, max_batch_total_tokens=288) as llm:
        for turn in range(3):
            for prompt in prompts:
                (output,) = llm.generate([prompt], max_tokens=1)
                if turn == 2:
                    assert output.usage.cached_tokens == len(PROMPT) // 16 * 16
        statistics = llm.statistics()
        assert statistics.num_stored_blocks >= len(PROMPT) // 16
        assert statistics.num_restored_tokens > 0
