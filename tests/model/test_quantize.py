"""Tests of the rules that decide when weights are quantized to 8 bits."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from bridle.config import ModelConfig
from bridle.cpu_kernels.linear import QuantizedLinear
from bridle.model import quantize
from bridle.model.loader import prepare_linears
from bridle.model.quality import answered_by
from bridle.model.quantize import Int8Linear, are_experts, int8_ratio, make_quantized, quantize_linears
from bridle.model.quantized_experts import PackedExperts
from tests.fakes import tiny_checkpoints
from tests.gguf.kit import load, logits

_WIDE: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 32}
#: Nemotron-H with experts between other layers.
_BETWEEN: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_shared_expert_intermediate_size": 32,
    "mlp_hidden_act": "relu2",
}


class Toy(torch.nn.Module):
    """A model with an embedding and a head, the parts that the loader needs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64)

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embedding


@pytest.mark.parametrize(("ratio", "is_used"), [(0.3, True), (1.0, True), (40.0, False)])
def test_int8_is_left_alone_where_it_is_slower(
    ratio: float, is_used: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quantize, "kernels", lambda: None)
    monkeypatch.setattr(quantize, "int8_ratio", lambda: ratio)
    model = Toy()
    with caplog.at_level(logging.WARNING):
        prepare_linears(model, ModelConfig(quantization="int8"))
    assert any(isinstance(module, Int8Linear) for module in model.modules()) == is_used
    assert bool(caplog.records) != is_used
    if not is_used:
        assert "40.0 times as long as float32" in caplog.text


def test_trial_compares_the_two_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([6.0, 2.0, 5.0, 2.0])
    monkeypatch.setattr(quantize, "_best_time", lambda form, rows: next(times))
    int8_ratio.cache_clear()
    assert int8_ratio() == 2.5, "the better of 3 times as long at one row and 2.5 at sixteen"
    int8_ratio.cache_clear()


@pytest.mark.parametrize("form", ["q8_0", "q4_0"])
def test_blocks_need_kernels(form: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = Toy()
    monkeypatch.setattr(quantize, "kernels", lambda: None)
    with caplog.at_level(logging.WARNING):
        prepare_linears(model, ModelConfig(quantization=form))
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    assert f"{form} is slow without" in caplog.text


def test_odd_inputs_take_eight_bits_with_one_scale() -> None:
    made = [make_quantized(torch.nn.Linear(size, 64), "q4_0") for size in (64, 72)]
    assert [type(layer) for layer in made] == [QuantizedLinear, Int8Linear]


@pytest.mark.parametrize(("family", "form"), [("mixtral", "int8"), ("qwen3_moe", "q8_0"), ("nemotron_h", "q8_0")])
def test_experts_are_quantized_one_by_one(family: str, form: str) -> None:
    fields = _BETWEEN if family == "nemotron_h" else {}
    path = tiny_checkpoints.cached_checkpoint(family, **{**_WIDE, **fields})
    model, plain = load(path), load(path)
    experts = [module for module in model.modules() if are_experts(module)]
    assert experts and quantize_linears(model, form) > 0
    packed = [module for module in model.modules() if isinstance(module, PackedExperts)]
    assert len(packed) == len(experts) and not any(each._parameters for each in experts)
    assert not any(parameter.dim() == 3 and parameter.shape[1] > 1 for parameter in model.parameters())
    want, have = logits(plain), logits(model)
    errors = (have - want).square().mean(-1).sqrt() / want.square().mean().sqrt()
    assert 0 < float(errors.median()) < 0.05  # where two experts nearly tie, rounding may take the other one


@pytest.mark.parametrize("name", ["is_transposed", "has_bias", "has_post_expert_norm", "_is_expert_parallel"])
def test_experts_of_other_layouts_stay_as_they_are(name: str) -> None:
    path = tiny_checkpoints.cached_checkpoint("qwen3_moe", **_WIDE)
    found = next(module for module in load(path).modules() if are_experts(module))
    setattr(found, name, True)
    assert not are_experts(found)


def test_the_quality_of_a_form_is_that_of_its_experts_too() -> None:
    model = load(tiny_checkpoints.cached_checkpoint("qwen3_moe", **_WIDE))
    made: list[type] = []

    def make(module: torch.nn.Module) -> torch.nn.Module:
        made.append(type(module))
        return module

    with answered_by(model, make):
        pass
    assert any(are_experts(module) for module in model.modules()) and len(set(made)) == 2
