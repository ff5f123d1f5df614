"""Tests of quantized linear layers, with the instructions that this machine has."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from bridle.cpu_kernels.ggml import TYPES
from bridle.cpu_kernels.linear import FORMS, QuantizedLinear
from bridle.errors import InvalidRequest
from tests.cpu_kernels.blocks import random_blocks


@pytest.mark.parametrize("name", TYPES)
def test_product_is_that_of_the_dequantized_weight(name: str) -> None:
    torch.manual_seed(0)
    num_outputs, num_inputs = 37, 512
    blocks = random_blocks(name, num_outputs, num_inputs, 1)
    weight = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]))
    bias = torch.randn(num_outputs)
    layer = QuantizedLinear.from_ggml(name, blocks, (num_outputs, num_inputs), bias)
    rows = torch.randn(2, 3, num_inputs)
    want = torch.nn.functional.linear(rows, weight, bias)
    error = (layer(rows) - want).abs().max() / (want - bias).abs().max()
    assert float(error) < 0.03, "rounding of the rows to 8 bits, at most"
    torch.testing.assert_close(layer.weight, weight)
    assert layer(rows[:0]).shape == (0, 3, num_outputs)


@pytest.mark.parametrize("form", FORMS)
def test_weights_in_floating_point_are_rounded(form: str) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 40)
    layer = QuantizedLinear.from_float(linear.weight, form, linear.bias)
    assert float((layer.weight - linear.weight.detach()).abs().max()) < (0.001 if form == "Q8_0" else 0.02)
    rows = torch.randn(5, 96)
    assert float((layer(rows) - linear(rows).detach()).abs().max()) < (0.05 if form == "Q8_0" else 0.3)


def test_unknown_types_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="Q3_K"):
        QuantizedLinear.from_ggml("Q3_K", np.zeros((1, 1), np.uint8), (1, 32))
    with pytest.raises(InvalidRequest, match="cannot be quantized to Q6_K"):
        QuantizedLinear.from_float(torch.zeros(2, 256), "Q6_K")
