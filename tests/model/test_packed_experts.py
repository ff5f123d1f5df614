"""Tests of checkpoints in their published forms: experts in 8 and 4 bits, and quantized models with a vision tower.
Each model must compute what its dequantized weights compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bridle import LLM, SamplingParams
from bridle.errors import UnsupportedModel
from bridle.model.quantized_experts import PackedExperts
from tests.fakes import tiny_checkpoints, vision_checkpoints
from tests.gguf.kit import NEEDED, PROMPT, load, logits
from tests.model.packed_kit import deepseek_v4, make, mxfp4, packed_and_plain

_SIZES: dict[str, Any] = {"moe_intermediate_size": 64, "num_hidden_layers": 2}
#: Sides that squares and groups divide.
_LATENT: dict[str, Any] = {
    **NEEDED["deepseek_v3"],
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "head_dim": 16,
    "v_head_dim": 16,
}


def _close(packed: Path, plain: Path, compute: Callable[[Any], Tensor] = logits) -> bool:
    """Return whether the median error of the rows is small. Single rows may differ, as rounding may choose a different
    expert."""
    want, have = compute(load(plain)), compute(load(packed))
    errors = (have - want).square().mean(-1).sqrt() / want.square().mean().sqrt()
    return 0 <= float(errors.median()) < 0.05


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("family", "form", "changes"),
    [
        ("qwen3_moe", "float8 of squares", {}),
        ("qwen3_moe", "packed", {}),
        ("qwen3_moe", "nvfp4 of modelopt", {}),
        ("deepseek_v3", "float8 of squares", _LATENT),
        ("deepseek_v3", "packed", _LATENT),
        (
            "minimax_m2",
            "float8 of squares",
            {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
        ),
        ("mixtral", "float8 of rows", {}),
    ],
    ids=str,
)
def test_experts_of_their_own_files(family: str, form: str, changes: dict[str, Any], tmp_path: Path) -> None:
    packed, plain = make(form, tmp_path, family, **{**_SIZES, **changes})
    model = load(packed)
    mixtures = [module for module in model.modules() if isinstance(module, PackedExperts)]
    assert mixtures and not any(parameter.dim() == 3 for parameter in model.parameters())
    assert _close(packed, plain)


def test_gpt_oss_as_published(tmp_path: Path) -> None:
    original = tiny_checkpoints.cached_checkpoint(
        "gpt_oss", hidden_size=64, intermediate_size=64, head_dim=16, num_hidden_layers=2, layer_types=None
    )
    packed, plain = mxfp4(tmp_path, original)
    want: Any = next(module for module in load(plain).modules() if hasattr(module, "gate_up_proj"))
    model = load(packed)
    have: Any = next(module for module in model.modules() if isinstance(module, PackedExperts))
    for number in range(4):
        gate, values = (layer.weight for layer in have.inner[number])
        assert torch.equal(torch.stack((gate, values), 1).flatten(0, 1), want.gate_up_proj[number].t())
        assert torch.equal(have.down[number].weight, want.down_proj[number].t())
    assert _close(packed, plain)
    with LLM(str(packed), num_blocks=32) as llm:
        assert llm.generate(["the one"], SamplingParams(max_tokens=4, ignore_eos=True))[0].text is not None


@torch.inference_mode()
def _eager_logits(model: Any) -> Tensor:
    """Return the logits [T, V] of transformers' own attention."""
    model.set_attn_implementation("eager")
    return model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]  # type: ignore[no-any-return]


def test_deepseek_v4_as_published(tmp_path: Path) -> None:
    original = tiny_checkpoints.cached_checkpoint("deepseek_v4", hidden_size=64, q_lora_rank=32, o_lora_rank=16)
    packed, plain = deepseek_v4(tmp_path, original)
    want: dict[str, Any] = dict(load(plain).named_modules())
    have: dict[str, Any] = dict(load(packed).named_modules())
    mixtures = [name for name, module in have.items() if isinstance(module, PackedExperts)]
    assert len(mixtures) == 4
    for name in mixtures:
        for number in range(4):
            inner = torch.cat([layer.weight for layer in have[name].inner[number]])
            assert torch.equal(inner, want[name].gate_up_proj[number])
            assert torch.equal(have[name].down[number].weight, want[name].down_proj[number])
    for name in (f"model.layers.{number}.self_attn.o_a_proj" for number in range(4)):  # of a kind of its own
        assert type(have[name]) is type(want[name]) and torch.equal(have[name].weight, want[name].weight)
    assert _close(packed, plain, _eager_logits)


@pytest.mark.parametrize("form", ["float8 of wholes", "float8 of squares"])
def test_a_model_with_a_tower(form: str, tmp_path: Path) -> None:
    """The loader reads quantized checkpoints with a vision tower, the published form of Ministral 3 and Devstral 2."""
    packed, plain = packed_and_plain(form, tmp_path, vision_checkpoints.make_seeing("mistral3", tmp_path / "original"))
    assert _close(packed, plain)


def test_a_missing_matrix_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    packed, _ = make("float8 of squares", tmp_path, "qwen3_moe", **_SIZES)
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, packed / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=name.replace(".", r"\.")):
        load(packed)
