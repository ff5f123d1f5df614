"""Tests that attention over keys that an index selects equals transformers', however the cache is used."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bridle.config import ModelConfig
from bridle.engine.scheduling.step_plan import PlanRow, StepPlan
from bridle.errors import InvalidRequest
from bridle.lora import require_device
from bridle.model.check import check_model
from bridle.model.executor import LocalExecutor
from bridle.model.loading import load_executor
from tests.fakes import tiny_checkpoints
from tests.model.oracle import Oracle, check_run, run

PROMPT = [(7 * number) % 290 + 3 for number in range(60)]


def load(family: str, **settings: object) -> LocalExecutor:
    path = tiny_checkpoints.cached_checkpoint(family)
    loaded = load_executor(ModelConfig(str(path), dtype="float32", num_blocks=64, block_size=4, **settings))  # type: ignore[arg-type]
    assert isinstance(loaded, LocalExecutor)
    return loaded


def last_logits(executor: LocalExecutor, *rows: PlanRow) -> Tensor:
    executor.reset()
    executor.forward(StepPlan(1, list(rows)))
    assert executor.logits is not None
    return executor.logits


def row(seq_id: int, length: int) -> PlanRow:
    blocks = tuple(range(16 * seq_id, 16 * seq_id + -(-length // 4)))
    return PlanRow(seq_id, 0, length, 1, 0, tuple(PROMPT[:length]), 0, blocks)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_every_sampled_token_is_the_oracles(family: str) -> None:
    """The run has forks, rewinds, chunks, preemption and prefix hits, over a cache that is too small."""
    path = tiny_checkpoints.cached_checkpoint(family)
    check_run(Oracle(path), *run(path, random.Random(5), 300))


def test_the_index_leaves_keys_out() -> None:
    """Logits change if the index selects all keys, so the tests above would notice an index that does."""
    path = tiny_checkpoints.cached_checkpoint("deepseek_v32")
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    with torch.inference_mode():
        few = model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]
        for layer in model.model.layers:
            layer.self_attn.indexer.index_topk = 1_000
        every = model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]
    assert torch.allclose(few[:16], every[:16], atol=1e-4)
    assert not torch.allclose(few[16:], every[16:], atol=1.0)


def test_neighbours_change_no_bit_of_attention() -> None:
    """A short sequence, which selects all of its keys, has the same logits beside a long one, which selects some."""
    executor = load("deepseek_v32")
    alone = last_logits(executor, row(0, 10))
    beside = last_logits(executor, row(0, 10), row(1, 60))
    assert torch.allclose(alone[0], beside[0], atol=1e-4)
    assert torch.allclose(last_logits(executor, row(1, 60))[0], beside[1], atol=1e-4)
    executor.close()


def test_pieces_of_a_long_row_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = load("glm_moe_dsa")
    whole = last_logits(executor, row(0, 60))
    monkeypatch.setattr("bridle.model.indexed_attention.MAX_SCORES", 16 * 60 * 7)
    assert torch.allclose(last_logits(executor, row(0, 60)), whole, atol=1e-3)
    executor.close()


def test_index_keys_count_as_memory() -> None:
    executor = load("deepseek_v32")
    cache, shapes = executor.runner.attention.cache, tiny_checkpoints.INDEXED_FAMILIES["deepseek_v32"]
    per_token = 3 * (shapes["index_head_dim"] + 4 * (8 + 8 + 8))
    assert cache.num_bytes == 64 * 4 * 4 * per_token
    assert executor.info.block_bytes == 4 * 4 * per_token
    executor.close()


def test_eight_bits_are_too_few_for_index_keys() -> None:
    with pytest.raises(InvalidRequest, match="keys are selected by an index, which int8 cannot hold") as caught:
        load("deepseek_v32", kv_cache_dtype="int8")
    assert caught.value.param == "kv_cache_dtype"


def test_adapters_name_no_layer_that_sees_parts_of_a_step() -> None:
    executor = load("deepseek_v32")
    names = require_device(executor).layers
    assert "model.layers.1.self_attn.o_proj" in names
    assert not any(".indexer." in name for name in names)
    executor.close()


def test_quantized_layers_select_too() -> None:
    path = tiny_checkpoints.cached_checkpoint("deepseek_v32")
    executor = load("deepseek_v32", quantization="q8_0")
    close = last_logits(executor, row(0, 12))
    executor.close()
    exact = load("deepseek_v32")
    assert torch.nn.functional.cosine_similarity(close, last_logits(exact, row(0, 12))).item() > 0.9
    exact.close()
    assert check_model(path, dtype="bfloat16", max_tokens=12).is_equal
