"""Tests of models with recurrent layers, and of newer models with experts, that are written to GGUF files and read
back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bridle import LLM, SamplingParams
from bridle.cpu_kernels.linear import QuantizedLinear
from bridle.errors import UnsupportedModel
from bridle.gguf import open_model
from bridle.model.gguf_matrix import ReorderedInputs
from bridle.model.quantized_experts import PackedExperts
from bridle.serving.models.export import quantize_model
from tests.covering import slow_but
from tests.fakes import tiny_checkpoints
from tests.gguf.kit import folder, load, logits, pair, rewritten
from tests.gguf.later_models import EXPERTS, OLDER, RECURRENT

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def _pair(name: str, kind: str = "F32", **sizes: Any) -> tuple[Path, Path]:
    family, fields = (RECURRENT | EXPERTS | OLDER)[name]
    return pair(family, kind, **{**fields, **sizes})


def _numbers(file: Path, name: str) -> Tensor:
    model = open_model(file)
    return torch.from_numpy(model.read(name)).view(torch.float32).view(model.tensors[name].shape)


#: Each kind of recurrence, latent and indexed attention, kinds of experts.
KINDS = {"lfm2", "qwen3_next", "qwen3_5", "nemotron_h_moe", "falcon_h1", "jamba", "mamba2", "kimi_linear", "ling"}
KINDS |= {"gpt2", "falcon", "mpt", "hy_v4", "granitemoe_swa", "minicpm3"}
KINDS |= {"deepseek_v32", "gemma3n", "llama4", "apertus", "mimo_v2_flash", "granitemoeshared"}


@pytest.mark.parametrize("name", slow_but(KINDS, [*RECURRENT, *EXPERTS, *OLDER]))
def test_a_file_gives_the_logits_of_the_folder(name: str) -> None:
    original, file = _pair(name)
    want = logits(load(original))
    assert float((want - logits(load(file))).abs().max()) <= 2e-5 * float(want.abs().max())


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "nemotron_h_moe", "kimi_linear", "jamba", "laguna"])
def test_a_file_is_served_as_the_folder_is(name: str) -> None:
    original, file = _pair(name)
    prompts = ["the one in an", "here and then"]
    with LLM(str(original), num_blocks=64) as here, LLM(str(file), num_blocks=64) as there:
        want, have = (llm.generate(prompts, GREEDY) for llm in (here, there))
    assert [each.outputs[0].token_ids for each in have] == [each.outputs[0].token_ids for each in want]


@pytest.mark.parametrize(
    ("name", "ends"),
    [("lfm2", "shortconv.conv.weight"), ("mamba", "ssm_conv1d.weight"), ("nemotron_h", "ssm_norm.weight")],
)
def test_convolutions_and_decays_stay_floats(name: str, ends: str) -> None:
    """Convolutions and decays of recurrent layers are written as F32, the only type that llama.cpp accepts for them."""
    tensors = open_model(_pair(name, "Q8_0")[1]).tensors
    kinds = {each: entry.kind.name for each, entry in tensors.items() if each.endswith((ends, "ssm_a"))}
    assert kinds and set(kinds.values()) == {"F32"}


def test_rows_of_a_delta_rule_lie_where_llamacpp_has_them() -> None:
    """Value heads of Qwen 3.5 are written in llama.cpp's order, for a layer with two key heads and four value heads."""
    original, file = _pair("qwen3_5")
    layer: Any = load(original).model.layers[0].linear_attn  # type: ignore[union-attr]
    turns = [0, 2, 1, 3]  # the first head of values of each key head, then the second ones
    rows = [head * 8 + number for head in turns for number in range(8)]
    late = [*range(32), *(32 + row for row in rows)]
    assert torch.equal(_numbers(file, "blk.0.attn_qkv.weight"), layer.in_proj_qkv.weight[late])
    assert torch.equal(_numbers(file, "blk.0.attn_gate.weight"), layer.in_proj_z.weight[rows])
    assert torch.equal(_numbers(file, "blk.0.ssm_beta.weight"), layer.in_proj_b.weight[turns])
    assert torch.equal(_numbers(file, "blk.0.ssm_out.weight"), layer.out_proj.weight[:, rows])
    assert torch.equal(_numbers(file, "blk.0.ssm_conv1d.weight"), layer.conv1d.weight[late, 0])
    assert torch.equal(_numbers(file, "blk.0.ssm_dt.bias"), layer.dt_bias[turns])
    assert torch.equal(_numbers(file, "blk.0.ssm_a"), -layer.A_log[turns].exp())


def test_rows_of_qwen3_next_lie_where_llamacpp_has_them() -> None:
    """Qwen3-Next's joined matrix of queries, keys, values and gates is split into the matrices that llama.cpp
    expects."""
    original, file = _pair("qwen3_next")
    weight = load(original).model.layers[0].linear_attn.in_proj_qkvz.weight  # type: ignore[union-attr]
    first, second = weight[:48], weight[48:]
    joined = torch.cat([half[part] for part in (slice(8), slice(8, 16), slice(16, 32)) for half in (first, second)])
    assert torch.equal(_numbers(file, "blk.0.attn_qkv.weight"), joined)
    assert torch.equal(_numbers(file, "blk.0.attn_gate.weight"), torch.cat((first[32:], second[32:])))


def test_rows_of_falcon_lie_where_llamacpp_has_them() -> None:
    """Falcon's joined matrix, which is grouped by key head in transformers, is written as all queries, keys, then
    values."""
    original, file = _pair("falcon")
    weight = load(original).transformer.h[0].self_attention.query_key_value.weight  # type: ignore[union-attr]
    first, second = weight[:32], weight[32:]
    parts = (slice(16), slice(16, 24), slice(24, 32))
    joined = torch.cat([half[part] for part in parts for half in (first, second)])
    assert torch.equal(_numbers(file, "blk.0.attn_qkv.weight"), joined)


@pytest.mark.parametrize(
    ("name", "key", "value", "reason"),
    [
        ("gpt2", "gpt2.feed_forward_length", 64, "not four times the hidden size"),
        ("bloom", "bloom.attention.head_count_kv", 2, "bloom with 2 key heads of size 8 is not supported"),
        ("mpt", "mpt.attention.max_alibi_bias", 0.0, "max_alibi_bias is 0.0; must be a whole number"),
        ("hy_v4", "hy_v4.swiglu_clamp_exp", [0.5, 0.0, 0.5], "swiglu_clamp_exp must be the same limit"),
    ],
)
def test_older_forms_that_are_not_read(name: str, key: str, value: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        load(rewritten(_pair(name)[1], "other", metadata={key: value}))


def test_factors_of_frequencies_are_not_left_out_silently() -> None:
    """The loader refuses RoPE factors for a family that cannot use them, as ignoring them would give wrong
    positions."""
    factors = {"rope_factors_long.weight": torch.ones(4)}
    with pytest.raises(UnsupportedModel, match="phimoe with a RoPE factor for each frequency is not supported"):
        load(rewritten(_pair("phimoe")[1], "factors", tensors=factors))


def test_a_mamba_layer_as_llamacpp_has_it() -> None:
    original, file = _pair("mamba2")
    mixer: Any = load(original).backbone.layers[1].mixer  # type: ignore[union-attr]
    assert torch.equal(_numbers(file, "blk.1.ssm_a"), -mixer.A_log.exp()[:, None])
    assert torch.equal(_numbers(file, "blk.1.ssm_d"), mixer.D[:, None])
    assert torch.equal(_numbers(file, "blk.1.ssm_norm.weight"), mixer.norm.weight.view(2, -1))
    metadata = open_model(file).metadata
    sizes = {
        key: metadata[f"mamba2.ssm.{key}"] for key in ("state_size", "time_step_rank", "inner_size", "group_count")
    }
    assert sizes == {"state_size": 8, "time_step_rank": 8, "inner_size": 64, "group_count": 2}


def test_nemotron_has_both_epsilons() -> None:
    """The file has the epsilon of RMS norms and that of layer norms, as llama.cpp requires both."""
    original, file = _pair("nemotron_h_moe")
    metadata, wanted = open_model(file).metadata, load(original).config.layer_norm_epsilon  # type: ignore[union-attr]
    for name in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
        assert metadata[f"nemotron_h_moe.attention.{name}"] == pytest.approx(wanted)


_WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3_5", {"linear_key_head_dim": 64, "linear_value_head_dim": 64}),
        ("qwen3_next", {"linear_key_head_dim": 64, "linear_value_head_dim": 64}),
        ("nemotron_h_moe", {"moe_shared_expert_intermediate_size": 256, "mamba_head_dim": 64}),
    ],
)
def test_packed_files_stay_packed_and_close(name: str, sizes: dict[str, Any], kind: str) -> None:
    original, file = _pair(name, kind, **_WIDE, **sizes)
    model, want = load(file), logits(load(original))
    errors = (logits(model) - want).square().mean(-1).sqrt() / want.square().mean().sqrt()  # [T]
    assert 0 < float(errors.median()) < (0.1 if kind == "Q8_0" else 0.7)
    assert any(isinstance(module, QuantizedLinear) for module in model.modules())
    if name == "qwen3_5":  # columns in another order, which blocks cannot be put in
        assert sum(isinstance(module, ReorderedInputs) for module in model.modules()) == 2
    if name == "nemotron_h_moe":
        assert sum(isinstance(module, PackedExperts) for module in model.modules()) == 2


def test_a_mixer_of_a_packed_file_is_that_of_its_numbers() -> None:
    """Products with reordered quantized weights equal those of transformers' layer, up to the quantization error."""
    original, file = _pair("qwen3_5", "Q8_0", **_WIDE, linear_key_head_dim=64, linear_value_head_dim=64)
    packed: Any = load(file).model.layers[0].linear_attn  # type: ignore[union-attr]
    whole: Any = load(original).model.layers[0].linear_attn  # type: ignore[union-attr]
    rows = torch.randn(5, 256, generator=torch.Generator().manual_seed(2))
    for part in ("in_proj_qkv", "in_proj_z", "out_proj"):
        want, have = getattr(whole, part)(rows), getattr(packed, part)(rows)
        assert float((want - have).abs().max() / want.abs().max()) < 0.03, part


def test_damaged_files_are_refused() -> None:
    _, file = _pair("mamba2")
    damaged = rewritten(file, "sign", tensors={"blk.0.ssm_a": torch.ones(8, 1)}, without=("blk.0.ssm_a",))
    with pytest.raises(UnsupportedModel, match=r"A_log' have shapes \(8, 1\), which do not match"):
        load(damaged)
    _, file = _pair("lfm2")
    with pytest.raises(UnsupportedModel, match="layer 0 has the tensors of no layer type of lfm2"):
        load(rewritten(file, "kind", without=("blk.0.shortconv.conv.weight",)))
    _, file = _pair("qwen3_5")
    odd = {"qwen35.ssm.time_step_rank": 3}
    with pytest.raises(UnsupportedModel, match="time_step_rank is 3; it must be a multiple of 2"):
        load(rewritten(file, "odd", metadata=odd))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("falcon_h1", {"key_multiplier": 0.5}, "key_multiplier=0.5 of this family cannot be stored"),
        ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate=True"),
        ("gpt_bigcode", {"multi_query": False}, "multi_query=False"),
        ("gpt2", {"n_inner": 64}, "4 hidden sizes wide"),
        ("granite_swa", {"layer_rope_theta": [1e4, 5e4, 1e4]}, "RoPE bases that differ"),
        ("granite_h", {"num_local_experts": 0, "num_experts": 0}, "without experts cannot be written"),
    ],
)
def test_what_a_file_cannot_say_is_refused(name: str, changes: dict[str, Any], reason: str) -> None:
    family, fields = (RECURRENT | EXPERTS | OLDER)[name]
    original = tiny_checkpoints.cached_checkpoint(family, **{**fields, **changes})
    with pytest.raises(UnsupportedModel, match=reason):
        quantize_model(str(original), folder() / "never.gguf", "F32")
