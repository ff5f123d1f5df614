"""Tests of families with their own attention functions: variants that `test_parity` lacks, large positions, and whole
generations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bridle import LLM, SamplingParams
from bridle.errors import InvalidRequest
from bridle.model.check import check_model
from tests.fakes import tiny_checkpoints

_WHOLE: dict[str, Any] = {"num_key_value_heads": None, "head_dim": None, "new_decoder_architecture": False}
_ALIBI: dict[str, Any] = {**_WHOLE, "alibi": True, "multi_query": False}


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("bloom", {"hidden_size": 32, "n_head": 4, "apply_residual_connection_post_layernorm": True}),
        ("falcon", {**_WHOLE, "multi_query": True}),
        ("falcon", {**_WHOLE, "multi_query": False, "parallel_attn": False, "num_kv_heads": None}),
        ("falcon", {**_ALIBI, "bias": True, "num_kv_heads": None}),
        ("falcon", {**_ALIBI, "hidden_size": 48, "num_attention_heads": 6, "num_kv_heads": None}),
        ("llama4_text", {"use_qk_norm": False, "attention_chunk_size": 7}),
        ("mpt", {"attn_config": {"clip_qkv": 0.5, "alibi_bias_max": 4, "softmax_scale": 0.3}}),
    ],
    ids=str,
)
def test_variants_equal_the_library_at_later_positions(family: str, changes: dict[str, Any]) -> None:
    report = check_model(tiny_checkpoints.cached_checkpoint(family, **changes), max_tokens=200)
    assert report.is_equal, str(report)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["bloom", "falcon", "gptj", "llama4_text", "mpt"])
def test_generations_are_those_of_the_library(family: str) -> None:
    folder = tiny_checkpoints.cached_checkpoint(family)
    prompts = [[1, 40, 77, 90, 44], [5 + 7 * at % 250 for at in range(90)]]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        want = [
            model.generate(torch.tensor([ids]), max_new_tokens=8, eos_token_id=None)[0, len(ids) :] for ids in prompts
        ]
    with LLM(str(folder), num_blocks=64, unnamed_ids=True) as llm:
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        twice = [llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling) for _ in range(2)]
    for found in twice:  # the second time from the prefix cache
        assert [list(each.outputs[0].token_ids) for each in found] == [ids.tolist() for ids in want]


def test_biases_in_half_precision() -> None:
    """MPT's position biases are exact in bfloat16, because each bias is a sum of numbers that bfloat16 represents."""
    report = check_model(tiny_checkpoints.cached_checkpoint("mpt"), dtype="bfloat16", max_tokens=200)
    assert report.is_equal, str(report)


def test_keys_with_biases_are_not_rounded_to_8_bits() -> None:
    folder = str(tiny_checkpoints.cached_checkpoint("bloom"))
    with pytest.raises(InvalidRequest, match="biases of positions") as caught:
        LLM(folder, kv_cache_dtype="int8")
    assert caught.value.param == "kv_cache_dtype"
