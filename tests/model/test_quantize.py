"""When 8 bits are used, and when they are not."""

from __future__ import annotations

import logging

import pytest
import torch

from bridle.config import ModelConfig
from bridle.cpu_kernels.linear import QuantizedLinear
from bridle.model import quantize
from bridle.model.loader import prepare_linears
from bridle.model.quantize import Int8Linear, int8_ratio, make_quantized


class Toy(torch.nn.Module):
    """Model with the parts that the loader needs."""

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
