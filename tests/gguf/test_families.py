"""Tests that a model written to a GGUF file and read back gives the same logits, for each family."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridle import LLM, SamplingParams
from bridle.cpu_kernels.library import kernels
from bridle.cpu_kernels.linear import QuantizedLinear
from bridle.errors import UnsupportedModel
from bridle.gguf.dequantize import decode_blocks
from bridle.gguf.traits import TRAITS
from bridle.model.check import check_model
from bridle.model.checkpoint import inspect_checkpoint
from bridle.model.hub_lookup import resolve_model
from bridle.model.linear import PackedLinear
from bridle.model.quantize import prepare_quantized
from bridle.model.quantized_experts import PackedExperts
from bridle.model.rope import fix_rotary_scaling
from bridle.serving.models.export import quantize_model
from tests.covering import slow_but
from tests.fakes import tiny_checkpoints
from tests.gguf.kit import (
    ALIASES,
    ALL_FAMILIES,
    EXPERT_SIZES,
    NEEDED,
    folder,
    load,
    logits,
    mxfp4_file,
    pair,
    rewritten,
    split_file,
)
from tests.model.oracle import Oracle, check_run, run

#: Biases, norms and windows, fused and latent projections, kinds of experts, layers that share, one more name.
KINDS = {"llama", "gemma3_text", "gemma4_text", "phi3", "gpt_oss", "qwen2_moe", "deepseek_v3", "cohere2", "olmo2"}
KINDS |= {"stablelm", "glm4_moe", "hunyuan_v1_moe", "starcoder2", "qwen2vl"}


@pytest.mark.parametrize("family", slow_but(KINDS, [*ALL_FAMILIES, *ALIASES]))
def test_a_file_without_loss_gives_the_same_logits(family: str) -> None:
    original, file = pair(family)
    assert torch.equal(logits(load(original)), logits(load(file)))


YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
STRETCHED = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 1.0, "alpha": 50.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
        {"rope_parameters": YARN},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 16},
    ],
    ids=str,
)
def test_a_file_of_a_variant_gives_its_logits(changes: dict[str, Any]) -> None:
    original, file = pair("llama", **changes)
    want, have = logits(load(original)), logits(load(file))
    # The divisors of Llama 3's frequencies are stored in 32 bits, rounded once more than the frequencies are.
    assert float((want - have).abs().max()) <= (1e-3 if changes.get("rope_parameters") == LLAMA3 else 0.0)
    plain = logits(load(pair("llama")[0]))
    assert float((want - plain).abs().max()) > 0.01  # the variant is one


def test_yarn_of_gpt_oss() -> None:
    """gpt-oss does not truncate YaRN's ramp to whole frequencies. GGUF has no field for this, so the reader adds the
    setting."""
    rope = {**YARN, "rope_theta": 150_000.0, "factor": 32.0, "truncate": False}
    original, file = pair("gpt_oss", rope_parameters=rope)
    want = logits(load(original))
    assert torch.equal(want, logits(load(file)))
    assert float((want - logits(load(pair("gpt_oss")[0]))).abs().max()) > 0.01


def test_experts_of_type_mxfp4() -> None:
    """MXFP4 experts become 8-bit blocks without loss, with gates and biases."""
    file = mxfp4_file(pair("gpt_oss", **EXPERT_SIZES)[1])
    model = load(file)
    checkpoint = inspect_checkpoint(resolve_model(str(file)))
    source = checkpoint.gguf
    assert source is not None
    packed = sum(entry.num_values for entry in source.tensors.values() if entry.kind.name == "MXFP4")
    assert checkpoint.weight_bytes(4, keeps_blocks=True) == 4 * (source.num_values - packed) + packed * 34 // 32
    mixture: Any = next(module for module in model.modules() if isinstance(module, PackedExperts))
    for name, layers in (("gate", [inner[0] for inner in mixture.inner]), ("down", mixture.down)):
        blocks = torch.from_numpy(source.read(f"blk.0.ffn_{name}_exps.weight"))
        want = decode_blocks("MXFP4", blocks).view(4, 256, 256)
        assert torch.equal(torch.stack([layer.weight for layer in layers]), want)


def test_layers_that_guess_further_tokens_are_left_out() -> None:
    original, file = pair("glm4_moe")
    more = {"blk.3.nextn.eh_proj.weight": torch.ones(32, 64), "blk.3.attn_norm.weight": torch.ones(32)}
    counts = {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    assert torch.equal(logits(load(original)), logits(load(rewritten(file, "drafts", metadata=counts, tensors=more))))
    with pytest.raises(UnsupportedModel, match=r"does not use, such as 'blk\.3\.attn_norm\.weight'"):
        load(rewritten(file, "left", tensors=more))


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"expert_gating_func": 1}, "expert_gating_func is 1"),
        ({"expert_used_count": 5}, "selects 5 of 4 experts"),
        ({"expert_group_count": 3}, "from 1 of 3 groups"),
        ({"nextn_predict_layers": 3}, "nextn_predict_layers is 3; must be a whole number from 0 to 2"),
    ],
)
def test_ways_of_choosing_that_are_not_read(metadata: dict[str, Any], reason: str) -> None:
    file = rewritten(pair("glm4_moe")[1], "odd", metadata={f"glm4moe.{key}": value for key, value in metadata.items()})
    with pytest.raises(UnsupportedModel, match=reason):
        load(file)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (
            "exaone4",
            {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        ),
        ("exaone4", {"rope_parameters": LLAMA3}),
        ("deepseek_v2", {"q_lora_rank": None, "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"}),
        ("deepseek_v2", {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
        ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "n_shared_experts": 1}),
        ("hunyuan_v1_dense", {"rope_parameters": STRETCHED}),
        ("hunyuan_v1_dense", {"attention_bias": True, "tie_word_embeddings": True}),
        ("glm4_moe", {"n_group": 2, "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 2}),
        (
            "gemma4_text",
            {
                "num_kv_shared_layers": 0,
                "use_double_wide_mlp": False,
                "hidden_size_per_layer_input": 0,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "vocab_size_per_layer_input": 0,
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 32,
            },
        ),
        ("glm4_moe", {"use_qk_norm": False, "first_k_dense_replace": 2}),
    ],
    ids=str,
)
def test_variants_of_other_families(family: str, changes: dict[str, Any]) -> None:
    original, file = pair(family, **changes)
    want = logits(load(original))
    assert float((want - logits(load(file))).abs().max()) <= (1e-3 if "rope_parameters" in changes else 0.0)
    assert float((want - logits(load(pair(family)[0]))).abs().max()) > 0.01  # the variant is one


@pytest.mark.parametrize(
    ("family", "tensor", "shape"),
    [
        ("deepseek_v3", "blk.0.attn_k_b.weight", (3, 5)),
        ("deepseek_v3", "blk.0.attn_v_b.weight", (4, 12, 17)),
        ("deepseek_v3", "blk.1.exp_probs_b.bias", (5,)),
        ("gpt_oss", "blk.0.ffn_gate_exps.weight", (4, 63, 32)),
        ("gpt_oss", "blk.0.ffn_up_exps.bias", (4,)),
        ("gpt_oss", "blk.0.attn_sinks.weight", (3,)),
    ],
)
def test_parts_that_do_not_fit_are_refused(family: str, tensor: str, shape: tuple[int, ...]) -> None:
    damaged = rewritten(pair(family)[1], "damaged", tensors={tensor: torch.ones(shape)}, without=(tensor,))
    with pytest.raises(UnsupportedModel, match=r"have shapes .* do not match|has shape .* implies"):
        load(damaged)


def test_the_context_chooses_minicpms_factors() -> None:
    """The context length decides which of MiniCPM's two lists of RoPE factors the model uses."""
    _, file = pair("minicpm")
    rows = {"long": [1.0, 2.0, 4.0, 8.0], "short": [1.0, 1.1, 1.2, 1.3]}
    lists = {f"rope_factors_{name}.weight": torch.tensor(row) for name, row in rows.items()}
    model: Any = load(rewritten(file, "factors", tensors=lists))
    plain: Any = load(file)
    divided = plain.model.rotary_emb.inv_freq / lists["rope_factors_short.weight"]
    assert torch.allclose(model.model.rotary_emb.inv_freq, divided)
    assert float((logits(model) - logits(plain)).abs().max()) > 0.01


def test_an_older_file_of_deepseek() -> None:
    """Older files of DeepSeek have one undivided matrix for keys and values, and the sizes of the undivided heads."""
    original, file = pair("deepseek_v3")
    whole: Any = load(original)
    weights = {
        f"blk.{number}.attn_kv_b.weight": layer.self_attn.kv_b_proj.weight
        for number, layer in enumerate(whole.model.layers)
    }
    sizes = {"attention.key_length": 12, "attention.value_length": 12, "attention.head_count_kv": 4}
    older = rewritten(
        file,
        "older",
        metadata={f"deepseek2.{key}": value for key, value in sizes.items()},
        tensors=weights,
        without=("attn_k_b.weight", "attn_v_b.weight", "_mla"),
    )
    assert torch.equal(logits(whole), logits(load(older)))


def test_exaone_4_without_a_window(tmp_path: Path) -> None:
    """EXAONE 4 without a sliding window applies RoPE in all layers; otherwise layers without a window have no RoPE."""
    original, file = pair("exaone4")
    folder = Path(shutil.copytree(original, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"sliding_window": None, "layer_types": ["full_attention"] * 3}
    (folder / "config.json").write_text(json.dumps(config))
    have = load(rewritten(file, "whole", metadata={"exaone4.attention.sliding_window": 0}))
    assert torch.equal(logits(load(folder)), logits(have))
    made = quantize_model(str(folder), tmp_path / "made.gguf", "F32")
    assert torch.equal(logits(load(folder)), logits(load(made)))
    with pytest.raises(UnsupportedModel, match="sliding_window_pattern must be a number or a list of 3 layers"):
        load(rewritten(file, "short", metadata={"exaone4.attention.sliding_window_pattern": [True]}))


@pytest.mark.parametrize("max_positions", [512, 64])
def test_two_scalings_of_phi_3(max_positions: int) -> None:
    """The context length decides which of Phi-3's two lists of RoPE factors, long or short, the model uses."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 1.0,
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "original_max_position_embeddings": 64,
    }
    changes = {"max_position_embeddings": max_positions, "original_max_position_embeddings": 64}
    original, file = pair("phi3", rope_parameters=rope, **changes)
    models = [load(original), load(file)]
    for model in models:
        fix_rotary_scaling(model, max_positions)
    want, have = (logits(model) for model in models)
    assert torch.allclose(want, have, atol=1e-4)
    assert not torch.allclose(want, logits(load(pair("phi3")[0])), atol=0.01)


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M", "Q4_0", "Q5_K_M", "Q6_K", "Q5_0", "F16", "BF16"])
@pytest.mark.parametrize("tied", [False, True])
def test_packed_files_stay_packed_and_close(kind: str, tied: bool) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
    original, file = pair("llama", kind, **sizes, tie_word_embeddings=tied)
    model, want = load(file), logits(load(original))
    error = float((logits(model) - want).square().mean().sqrt() / want.square().mean().sqrt())
    limit = {"F16": 0.01, "BF16": 0.04, "Q8_0": 0.04, "Q6_K": 0.12, "Q5_K_M": 0.2, "Q5_0": 0.25}.get(kind, 0.5)
    assert 0 < error < limit
    packed = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert len(packed) == (0 if kind in ("F16", "BF16") else 2 * 7 + 1)
    if kind == "Q4_K_M":
        kinds = {
            name.rsplit(".", 1)[-1]: module.kind.name
            for name, module in model.named_modules()
            if isinstance(module, QuantizedLinear)
        }
        assert kinds["q_proj"] == "Q4_K" and kinds["lm_head"] == "Q6_K"


@pytest.mark.few(5)
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M", "Q5_0"])
def test_experts_stay_packed_and_close(family: str, kind: str) -> None:
    """All experts stay quantized, and the kernels give a token the same result alone and among other tokens."""
    original, file = pair(family, kind, **EXPERT_SIZES)
    model, want = load(file), logits(load(original))
    mixtures = [module for module in model.modules() if isinstance(module, PackedExperts)]
    assert len(mixtures) == 2 and not any(parameter.dim() == 3 for parameter in model.parameters())
    assert all(len(mixture.inner) == len(mixture.down) == 4 for mixture in mixtures)
    errors = (logits(model) - want).square().mean(-1).sqrt() / want.square().mean().sqrt()  # [T]
    # Where two experts nearly tie, rounding may take the other one: the middle of all rows tells.
    assert 0 < float(errors.median()) < {"Q8_0": 0.05, "Q5_0": 0.4}.get(kind, 0.6)
    prepare_quantized(model)
    random = torch.Generator().manual_seed(3)
    for mixture in mixtures if kernels() is not None else ():
        rows, weights = torch.randn(9, 256, generator=random), torch.rand(9, 2, generator=random)
        chosen = torch.rand(9, 4, generator=random).topk(2).indices
        together = mixture(rows, chosen, weights)
        alone = [mixture(rows[at : at + 1], chosen[at : at + 1], weights[at : at + 1]) for at in range(9)]
        assert torch.equal(together, torch.cat(alone))


def test_packed_experts_are_those_of_the_file() -> None:
    """Each expert's result equals the product with the dequantized weights of the file, up to the error of 8 bits."""
    _, file = pair("mixtral", "Q8_0", **EXPERT_SIZES)
    model = load(file)
    checkpoint = inspect_checkpoint(resolve_model(str(file)))
    assert checkpoint.gguf is not None
    mixture: Any = next(module for module in model.modules() if isinstance(module, PackedExperts))
    gate, up, down = (
        decode_blocks("Q8_0", torch.from_numpy(checkpoint.gguf.read(f"blk.0.ffn_{name}_exps.weight"))).view(4, 256, 256)
        for name in ("gate", "up", "down")
    )
    rows = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    for number in range(4):
        inner = torch.nn.functional.silu(rows @ gate[number].T) * (rows @ up[number].T)
        have = mixture(rows, torch.full((5, 1), number), torch.full((5, 1), 0.5))
        want = 0.5 * inner @ down[number].T
        assert float((have - want).abs().max() / want.abs().max()) < 0.03


#: The layers of the others are those of their checkpoints, whose engine `tests/model/test_engine_equality.py` compares.
_AGAIN = [pytest.param(family, marks=pytest.mark.slow) for family in ("gemma3_text", "qwen3_moe", "phi3", "gpt_oss")]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", *_AGAIN])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples // 10 or 1)
@given(seed=st.integers(0, 1 << 32))
def test_the_engine_draws_what_the_original_would(family: str, seed: int) -> None:
    """Random programs with forks, rewinds and preemption run on the file, and each token is the original model's
    choice."""
    original, file = pair(family)
    check_run(Oracle(original), *run(file, random.Random(seed), 300))


def test_texts_of_a_file_are_those_of_the_checkpoint() -> None:
    original, file = pair("qwen2")
    sampling = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)
    with LLM(str(original), num_blocks=64) as here, LLM(str(file), num_blocks=64) as there:
        want = here.generate(["the one in an", "her\u00e9 <|im_start|>x"], sampling)
        have = there.generate(["the one in an", "her\u00e9 <|im_start|>x"], sampling)
        assert [each.text for each in have] == [each.text for each in want]
        chat: list[Any] = [{"role": "user", "content": "in the end"}]
        assert there.tokenizer.encode_chat(chat) == here.tokenizer.encode_chat(chat)


def test_a_packed_model_in_the_engine_is_lean() -> None:
    """An engine joins linear layers of one block type into one product, and leaves all weights packed."""
    from bridle.config import ModelConfig
    from bridle.model.loading import load_executor

    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
    _, file = pair("llama", "Q4_K_M", **sizes)
    executor = load_executor(ModelConfig(str(file), num_blocks=8))
    model = executor.runner.model  # type: ignore[union-attr]
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(QuantizedLinear) >= 2 * 4 + 1 and PackedLinear not in kinds
    assert executor.runner.lowered is not None  # type: ignore[union-attr]
    executor.close()


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "F32"),
        ("llama", "Q8_0"),
        ("llama", "Q4_K_M"),
        ("qwen3_moe", "Q4_K_M"),
        ("gpt_oss", "Q8_0"),
        ("glm4_moe", "Q4_K_M"),
        ("deepseek_v2", "Q8_0"),
        ("hunyuan_v1_moe", "Q8_0"),
        ("hunyuan_v1_dense", "Q4_K_M"),
    ],
)
def test_a_file_passes_the_check_of_its_attention(family: str, kind: str) -> None:
    """The loader's comparison of attention with transformers decodes the same quantized blocks in both passes."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
    assert check_model(resolve_model(str(pair(family, kind, **EXPERT_SIZES if "moe" in family else sizes)[1]))).is_equal


def test_several_files_are_one_model(tmp_path: Path) -> None:
    original, file = pair("llama")
    split_file(file, tmp_path / "m")
    assert torch.equal(logits(load(original)), logits(load(tmp_path)))
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(UnsupportedModel, match=r"m-00002-of-00002\.gguf is missing"):
        load(tmp_path)


def test_the_vision_tower_next_to_a_model_is_not_one(tmp_path: Path) -> None:
    """A folder with a model and an `mmproj` file loads as the text model; images need the original checkpoint."""
    original, file = pair("qwen2vl")
    shutil.copy(file, tmp_path / "model-F32.gguf")
    (tmp_path / "mmproj-model-F32.gguf").write_bytes(b"GGUF")
    assert torch.equal(logits(load(original)), logits(load(tmp_path)))


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gptj", {}, "model type 'gptj' cannot be written"),
        ("olmo3", {"layer_types": ["full_attention"] * 3}, "needs one layer of full attention in every 4"),
        ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("phi", {"qk_layernorm": True}, "q_layernorm.weight' has no tensor name"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit 5.0 cannot be stored"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 1, "topk_group": 1}, "topk_method 'group_l"),
        (
            "deepseek_v3",
            {"rope_parameters": {**YARN, "mscale": 2.0, "mscale_all_dim": 1.0}},
            "mscale and mscale_all_dim to be equal",
        ),
        ("gpt_oss", {"rope_parameters": YARN}, "truncate=False"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 3}, "needs one layer of full attention in every 2"),
        ("mistral", {"sliding_window": 16}, "family with a sliding window"),
        ("gemma2", {"layer_types": ["full_attention"] * 3}, "needs one layer of full attention in every 2"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    ],
)
def test_what_a_file_cannot_say_is_refused(family: str, changes: dict[str, Any], reason: str) -> None:
    original = tiny_checkpoints.cached_checkpoint(family, **{**NEEDED.get(family, {}), **changes})
    out = folder() / "never.gguf"
    with pytest.raises(UnsupportedModel, match=reason):
        quantize_model(str(original), out, "F32")
    assert not out.exists() and not list(folder().glob(".never*"))


def test_models_whose_tokens_see_later_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both backends refuse a file whose metadata says that attention is not causal."""
    monkeypatch.setitem(TRAITS, "biases", (TRAITS["biases"][0], lambda config, put: put("attention.causal", False)))
    file = quantize_model(str(tiny_checkpoints.cached_checkpoint("llama")), folder() / "encoder.gguf", "F32")
    with pytest.raises(UnsupportedModel, match="this 'llama' has bidirectional attention"):
        resolve_model(str(file))
