"""Tests of checkpoints that other programs quantized: each format is made here, loaded, and compared with the weights
that it represents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bridle import LLM, SamplingParams
from bridle.config import ModelConfig
from bridle.cpu_kernels.linear import QuantizedLinear
from bridle.errors import UnsupportedModel
from bridle.model.loading import load_executor
from bridle.model.quantize import Int8Linear
from bridle.serving.models.export import quantize_model
from tests.fakes import tiny_checkpoints
from tests.gguf.kit import load, logits
from tests.model.packed_kit import FORMATS, make


@pytest.mark.few(8)
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_what_they_stand_for(name: str, tmp_path: Path) -> None:
    packed, plain = make(name, tmp_path)
    model, want = load(packed), load(plain)
    exact = FORMATS[name][2]
    layers = dict(want.named_modules())
    for key, layer in model.named_modules():
        if key.endswith("_proj"):
            assert isinstance(layer, exact or QuantizedLinear)
            error = (layer.weight - layers[key].weight).abs().amax() / layers[key].weight.abs().amax()
            assert float(error) <= (1e-6 if exact else 0.005)  # halves of a step of Q8_0
    if exact is not Int8Linear:  # which rounds activations as well
        difference = (logits(model) - logits(want)).square().mean().sqrt() / logits(want).square().mean().sqrt()
        assert float(difference) < (1e-5 if exact else 0.05)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["gptq", "awq", "int8", "float8 of squares"])
def test_packed_checkpoints_are_served(name: str, tmp_path: Path) -> None:
    packed, _ = make(name, tmp_path)
    with LLM(str(packed), num_blocks=32) as llm:
        sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        texts = [output.text for output in llm.generate(["the one", "in"], sampling)]
        assert [output.text for output in llm.generate(["the one", "in"], sampling)] == texts
    executor = load_executor(ModelConfig(str(packed), num_blocks=8))
    kinds = {type(module) for module in executor.runner.model.modules()}  # type: ignore[union-attr]
    assert (Int8Linear if name == "int8" else QuantizedLinear) in kinds
    executor.close()


def _change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    settings["quantization_config"] |= fields
    path.write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("gptq", {"quant_method": "bitsandbytes"}, "quantized by bitsandbytes; supported are awq, gptq, fp8"),
        ("gptq", {"bits": 3}, "GPTQ in form 'gptq' with 3 bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "GPTQ in form 'marlin'"),
        ("awq", {"version": "gemv"}, "AWQ in form 'gemv'"),
        ("float8 of squares", {"weight_block_size": [0, 1]}, "weight_block_size is"),
        (
            "float8 of squares",
            {"weight_block_size": [8, 8]},
            "packed weight of 'model.layers.0.self_attn.q_proj' cannot",
        ),
        ("int8", {"format": "marlin-24"}, "compressed-tensors format 'marlin-24'"),
        ("int8", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "weights are sparse"),
    ],
)
def test_what_is_not_understood_is_named(name: str, fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    packed, _ = make(name, tmp_path)
    _change(packed, **fields)
    with pytest.raises(UnsupportedModel, match=reason):
        load(packed)


def test_tensors_that_lack_or_are_left_over_are_named(tmp_path: Path) -> None:
    packed, _ = make("gptq", tmp_path)
    path = packed / "model.safetensors"
    tensors = load_file(path)
    for changed, reason in (
        ({**tensors, "model.extra.weight": torch.ones(2)}, "does not use, such as 'model.extra.weight'"),
        ({k: v for k, v in tensors.items() if k != "model.norm.weight"}, "lacks weight 'model.norm.weight'"),
        (
            {k: v for k, v in tensors.items() if not k.endswith("0.mlp.up_proj.scales")},
            "up_proj' cannot be read: KeyError",
        ),
        (
            {k: v for k, v in tensors.items() if not k.endswith("0.self_attn.q_proj.bias")},
            "'.*q_proj' of the checkpoint must have a bias",
        ),
    ):
        save_file(changed, path, metadata={"format": "pt"})
        with pytest.raises(UnsupportedModel, match=reason):
            load(packed)


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_checkpoint_in_8_bits_computes_what_loading_would(tied: bool, tmp_path: Path) -> None:
    original = tiny_checkpoints.cached_checkpoint("llama", hidden_size=64, head_dim=16, tie_word_embeddings=tied)
    saved = quantize_model(str(original), tmp_path / "int8", "int8")
    texts = []
    for model, quantization in ((original, "int8"), (saved, "none")):
        with LLM(str(model), num_blocks=32, quantization=quantization) as llm:
            sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=4, ignore_eos=True)
            texts.append([output.text for output in llm.generate(["the one", "in"], sampling)])
    assert texts[0] == texts[1]
    with pytest.raises(UnsupportedModel, match="is quantized already"):
        quantize_model(str(saved), tmp_path / "again", "int8")
