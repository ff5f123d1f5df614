"""Tests of properties of the kernels for packed weights in Triton's interpreter.

`test_codes.py` runs this file in a process of its own, where TRITON_INTERPRET is set before anything imports Triton."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from triton.runtime.interpreter import InterpreterBuilder as Builder

from bridle.lora.fused import is_interpreted
from bridle.model import support_checks
from bridle.model.checkpoint import Checkpoint, inspect_checkpoint
from bridle.model.geometry import discover_geometry
from bridle.model.loader import lower_model, read_model
from bridle.model.quantization import code_linear, weight_reading
from bridle.model.quantization.code_linear import CodeLinear
from bridle.model.quantization.codes import Codes, make_codes
from bridle.model.quantization.on_device import DeviceForms, find_problem
from bridle.model.quantization.weight_reading import read_packed_model
from tests.gguf.kit import logits
from tests.model.packed_kit import make, random_weight
from tests.model.paged_properties import dot_by_rows, watched

assert is_interpreted(), "run this with TRITON_INTERPRET=1"

CPU = torch.device("cpu")
# What was not written is not a number, so that nobody can rely on it.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(autouse=True)
def _small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small sizes, so that a small weight is split among several programs, and a few rows take the path for many
    rows."""
    monkeypatch.setattr(code_linear, "COLUMNS", 16)
    monkeypatch.setattr(code_linear, "JOINED_COLUMNS", 32)
    monkeypatch.setattr(code_linear, "MIN_BLOCKS", 1)
    monkeypatch.setattr(code_linear, "MAX_SHORT", 20)


@st.composite
def layers(draw: st.DrawFn) -> tuple[CodeLinear, torch.Tensor]:
    """Return a layer of packed weights, and its weights unpacked."""
    bits = draw(st.sampled_from([2, 4, 4, 8, "int8", "float8"]))
    num_outputs, num_inputs = draw(st.sampled_from([(8, 64), (24, 160), (40, 300)]))
    group = draw(st.sampled_from([16, 32, 20, num_inputs]))
    grouped = random_weight(
        draw(st.integers(0, 999)), bits, num_outputs, num_inputs, group, draw(st.booleans()), draw(st.booleans())
    )
    bias = torch.randn(num_outputs) if draw(st.booleans()) else None
    layer = CodeLinear(make_codes(grouped), bias, torch.float32)
    return layer, grouped.number()


ROWS = st.sampled_from([1, 2, 16, 17, 21, 37])


@settings(max_examples=40)
@given(made=layers(), num_rows=ROWS, seed=st.integers(0, 99))
def test_products_are_those_of_the_numbers(made: tuple[CodeLinear, torch.Tensor], num_rows: int, seed: int) -> None:
    layer, number = made
    rows = torch.randn(num_rows, layer.in_features, generator=torch.Generator().manual_seed(seed))
    want = functional.linear(rows.double(), number.double(), None if layer.bias is None else layer.bias.double())
    torch.testing.assert_close(layer(rows), want.float(), atol=1e-4 * float(want.abs().max()), rtol=0)


@settings(max_examples=20)
@given(made=layers(), num_rows=ROWS, seed=st.integers(0, 99))
def test_long_prompts_are_multiplied_by_the_decoded_weight(
    made: tuple[CodeLinear, torch.Tensor], num_rows: int, seed: int
) -> None:
    layer, number = made
    rows = torch.randn(num_rows, layer.in_features, generator=torch.Generator().manual_seed(seed))
    want = functional.linear(rows, number, layer.bias)
    with patch.object(code_linear, "MAX_CODED", 0):
        torch.testing.assert_close(layer(rows), want, atol=1e-4 * float(want.abs().max()), rtol=0)


@patch.object(Builder, "create_dot", dot_by_rows)
@settings(max_examples=12)
@given(made=layers(), num_rows=ROWS, data=st.data())
def test_a_row_is_bitwise_the_same_alone_and_among_others(
    made: tuple[CodeLinear, torch.Tensor], num_rows: int, data: st.DataObject
) -> None:
    """A row's result depends neither on the division of its work nor on neighbour rows that contain NaN."""
    layer, _ = made
    rows = torch.randn(num_rows, layer.in_features, generator=torch.Generator().manual_seed(1))
    number = data.draw(st.integers(0, num_rows - 1))
    together = layer(rows)
    assert torch.equal(layer(rows[number : number + 1])[0], together[number])
    others = torch.full_like(rows, float("nan"))
    others[number] = rows[number]
    assert torch.equal(layer(others)[number], together[number])
    with patch.object(code_linear, "MAX_SHORT", 0):
        assert torch.equal(layer(rows[number : number + 1])[0], together[number])


@settings(max_examples=10)
@given(made=layers(), num_rows=ROWS)
def test_no_program_leaves_its_tensors(made: tuple[CodeLinear, torch.Tensor], num_rows: int) -> None:
    layer, _ = made
    rows = torch.randn(num_rows, layer.in_features + 8)[:, : layer.in_features]  # a part of something wider
    held: list[torch.Tensor] = [rows]
    fresh = torch.Tensor.new_empty

    def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        held.append(fresh(self, *args, **kwargs))
        return held[-1]

    codes = layer.codes
    held += [each for each in (codes.words, codes.scales, codes.zeros, codes.order, layer.bias) if each is not None]
    with watched() as touched, patch.object(torch.Tensor, "new_empty", noted):
        layer(rows)
    ends = [(each.data_ptr(), each.data_ptr() + _extent(each)) for each in held]
    for addresses, size in touched:
        inside = np.zeros(addresses.shape, bool)
        for begin, end in ends:
            inside |= (addresses >= begin) & (addresses.astype(np.int64) + size <= end)
        assert inside.all()


def _extent(tensor: torch.Tensor) -> int:
    """Return the number of bytes from a tensor's first number to the end of its last number."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_in_half_precision(dtype: torch.dtype) -> None:
    grouped = random_weight(3, 4, 24, 160, 32, True, False)
    layer = CodeLinear(make_codes(grouped), None, dtype)
    assert find_problem(layer) is None
    wrong = CodeLinear(make_codes(grouped), None, dtype)
    wrong.codes = Codes(**{**_fields(wrong.codes), "bits": 4, "scales": wrong.codes.scales * 2})
    number = layer.codes.number()
    with patch.object(Codes, "number", lambda self: number):
        assert "differs by" in str(find_problem(wrong))


def _fields(codes: Codes) -> dict[str, Any]:
    return {name: getattr(codes, name) for name in Codes.__dataclass_fields__}


@pytest.mark.parametrize("name", ["gptq", "gptq ordered", "awq", "packed asymmetric", "int8", "float8 of squares"])
def test_a_packed_model_keeps_its_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all matrices packed and joined as on a GPU, logits equal those of the unpacked weights."""
    monkeypatch.setattr(weight_reading, "_maker", _device_maker)
    packed, plain = make(name, tmp_path, num_hidden_layers=1)
    want = logits(read_model(*_described(plain), torch.float32, CPU))
    checkpoint, described = _described(packed)
    model: Any = read_packed_model(checkpoint, described, torch.float32, CPU)
    assert {type(layer) for key, layer in model.named_modules() if key.endswith("_proj")} == {CodeLinear}
    assert float((logits(model) - want).abs().max() / want.abs().max()) < 1e-4
    geometry = discover_geometry(model, described.num_hidden_layers, CPU)
    lower_model(model, geometry)  # which compares each layer with the one that it stands for
    kinds = {type(layer) for key, layer in model.named_modules() if key.endswith((".qkv", ".gate_up", ".down"))}
    assert kinds == {CodeLinear}


def _described(folder: Path) -> tuple[Checkpoint, Any]:
    checkpoint = inspect_checkpoint(folder)
    return checkpoint, support_checks.read_config(checkpoint)


def _device_maker(scheme: Any, dtype: torch.dtype, device: torch.device, put: Any) -> Any:
    forms = DeviceForms(device, dtype)

    def made(name: str, stored: dict[str, torch.Tensor], linear: torch.nn.Linear) -> torch.nn.Module:
        bias = weight_reading._bias_of(name, stored, linear, dtype)
        layer = forms.make(weight_reading.read_grouped(name, stored, scheme), bias)
        assert layer is not None
        return layer

    return made
