"""Tests of packed weights on CUDA: their codes, and the layers with these weights.

If Triton is installed, the kernels run in its interpreter and are compiled for GPUs that the machine may lack. On a GPU
the tests also run the kernels."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bridle.errors import InvalidRequest
from bridle.model import float8
from bridle.model.device_defaults import check_quantization
from bridle.model.float8 import Float8Linear, use_float8
from bridle.model.quantization import code_linear, on_device
from bridle.model.quantization.code_linear import MAX_CODED, CodeLinear, share_blocks
from bridle.model.quantization.codes import join_codes, make_codes
from bridle.model.quantization.on_device import DeviceForms, keeps_bits
from bridle.model.quantization.weights import Grouped
from tests.kernels import check_properties, needs_triton
from tests.model.device_trace import Counted, traced
from tests.model.packed_kit import random_weight

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


FORMS = st.sampled_from([2, 4, 8, "int8", "float8"])
SIZES = st.sampled_from([(8, 64, 16), (24, 160, 32), (40, 300, 300), (5, 37, 7), (16, 256, 128), (8, 100, 24)])


@given(form=FORMS, size=SIZES, seed=st.integers(0, 999), has_zeros=st.booleans(), is_ordered=st.booleans())
def test_codes_are_the_same_numbers(
    form: int | str, size: tuple[int, int, int], seed: int, has_zeros: bool, is_ordered: bool
) -> None:
    grouped = random_weight(seed, form, *size, has_zeros, is_ordered)
    codes = make_codes(grouped)
    assert codes.shape == grouped.shape
    assert torch.equal(codes.number(), grouped.number())
    assert codes.words.nbytes <= (size[0] * (size[1] + codes.scales.shape[0] * 16 + 256)) * grouped.bits // 8
    if size[2] % 16 == 0 and not is_ordered:
        assert codes.order is None, "inputs as they come need no order"
    layer = CodeLinear(codes, None, torch.float32)
    rows = torch.randn(3, size[1])
    torch.testing.assert_close(layer(rows), rows @ grouped.number().t())


@given(form=FORMS, seed=st.integers(0, 999), has_zeros=st.booleans())
def test_outputs_side_by_side(form: int | str, seed: int, has_zeros: bool) -> None:
    parts = [random_weight(seed + n, form, size, 160, 32, has_zeros, False) for n, size in enumerate((24, 8))]
    whole = join_codes([make_codes(part) for part in parts])
    assert whole is not None
    assert torch.equal(whole.number(), torch.cat([part.number() for part in parts]))
    other = random_weight(seed, form, 8, 160, 80, has_zeros, False)
    assert join_codes([make_codes(parts[0]), make_codes(other)]) is None


def test_layers_move_with_their_codes() -> None:
    layer = CodeLinear(make_codes(random_weight(0, 4, 8, 64, 16, True, True)), torch.zeros(8), torch.float32)
    moved = layer.to("meta")
    assert {each.device.type for each in (moved.codes.words, moved.codes.scales, moved.codes.zeros)} == {"meta"}  # type: ignore[union-attr]
    assert sum(buffer.nbytes for buffer in layer.buffers()) > 0


@given(st.integers(1, 400), st.integers(1, 40_000))
def test_shares_cover_a_weight_and_follow_from_its_sizes(num_blocks: int, num_columns: int) -> None:
    size = share_blocks(num_blocks, num_columns)
    assert 1 <= size <= num_blocks
    assert size == num_blocks or size >= 4


def test_many_rows_decode_the_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 256 rows, torch multiplies by the unpacked weight, since the kernels would unpack the weight again for every
    tile."""
    meta = torch.device("meta")
    layer = CodeLinear(make_codes(random_weight(0, 4, 24, 160, 32, False, False)), None, torch.bfloat16).to(meta)
    for num_rows, kernels in ((MAX_CODED, {"multiply_whole": 1}), (MAX_CODED + 1, {"decode": 1, "mm": 1})):
        with traced() as trace:
            monkeypatch.setattr(code_linear, "kernels", lambda trace=trace: Counted(trace))
            out = layer(torch.empty(num_rows, 160, dtype=torch.bfloat16, device=meta))
        assert out.shape == (num_rows, 24)
        assert {name: count for (name, _), count in trace.launches.items()} == kernels


def test_types_without_codes_become_numbers(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "missing_for_triton", lambda device: None)
    grouped = random_weight(0, "float8", 16, 64, 64, False, False)
    other = Grouped(grouped.values.float().to(torch.float8_e5m2), grouped.scales, None, grouped.index, 8)
    forms = DeviceForms(CPU, torch.float32)
    with caplog.at_level(logging.WARNING):
        assert forms.make(other, None) is None
        assert forms.make(other, None) is None
    assert [record.message for record in caplog.records] == [
        "packed weights are converted to float32: weights of type torch.float8_e5m2 cannot be stored as codes"
    ]


def test_without_triton_weights_become_numbers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_device, "missing_for_triton", lambda device: "Triton")
    assert not keeps_bits(CUDA)
    assert keeps_bits(CPU)
    with caplog.at_level(logging.WARNING):
        assert DeviceForms(CPU, torch.float16).make(random_weight(0, 4, 16, 64, 16, False, False), None) is None
    assert "packed weights are converted to float16: kernels that read them need Triton" in caplog.text


def test_a_kernel_that_fails_is_told_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "missing_for_triton", lambda device: None)
    monkeypatch.setattr(CodeLinear, "forward", lambda self, rows: rows.new_zeros(rows.shape[0], self.out_features))
    forms = DeviceForms(CPU, torch.float32)
    with caplog.at_level(logging.WARNING):
        assert forms.make(random_weight(0, 4, 16, 64, 16, False, False), None) is None
    assert "a kernel for 4 bits fails: a product of 1 rows differs by" in caplog.text


# -- float8 --------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace torch's query of a GPU's capability; return the settings of the fake GPU."""
    settings = SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: settings.capability)
    return settings


def test_who_may_have_float8(gpu: SimpleNamespace) -> None:
    check_quantization("fp8", CUDA)
    for capability, device, reason in (
        ((8, 6), CUDA, "'fp8' needs a GPU of compute capability 8.9; this one has 8.6"),
        ((9, 0), CPU, "'fp8' needs CUDA; the device is cpu"),
    ):
        gpu.capability = capability
        with pytest.raises(InvalidRequest, match=reason) as caught:
            check_quantization("fp8", device)
        assert caught.value.param == "quantization"
    check_quantization("int8", CPU)
    with pytest.raises(InvalidRequest, match="'int8' needs a CPU"):
        check_quantization("int8", CUDA)


class Toy(torch.nn.Module):
    """A model with two layers that can be packed, one that cannot, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.odd = (torch.nn.Linear(*sides) for sides in ((64, 48), (48, 64), (64, 30)))
        self.head = torch.nn.Linear(64, 64)
        self.requires_grad_(False)

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.head


@pytest.fixture
def products_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch's product of float8 rows with scales by one in float32 if this torch lacks it on CPUs (before
    2.12)."""
    if float8.find_problem(CPU, torch.bfloat16) is None:
        return

    def multiply(left: Tensor, right: Tensor, scale: Tensor, other: Tensor, out_dtype: torch.dtype) -> Tensor:
        return ((left.float() * scale) @ (right.float() * other)).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    assert float8.find_problem(CPU, torch.bfloat16) is None


@pytest.mark.usefixtures("products_by_row")
def test_layers_in_float8_are_nearly_what_they_were() -> None:
    model, rows = Toy().to(torch.bfloat16), torch.randn(5, 64, dtype=torch.bfloat16)
    want = [layer(rows) for layer in (model.first, model.head)]
    assert use_float8(model, CPU, torch.bfloat16) == 2
    kinds = [type(layer) for layer in (model.first, model.second, model.odd, model.head)]
    assert kinds == [Float8Linear, Float8Linear, torch.nn.Linear, torch.nn.Linear]
    error = (model.first(rows) - want[0]).float().square().mean().sqrt() / want[0].float().square().mean().sqrt()
    assert 0 < float(error) < 0.05
    assert torch.equal(model.head(rows), want[1])
    assert model.first(rows[:0]).shape == (0, 48)
    assert model.first(rows[None]).shape == (1, 5, 48)


def test_where_products_in_float8_fail_weights_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Toy()
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **kwargs: torch.zeros(args[0].shape[0], 512))
    with caplog.at_level(logging.WARNING):
        assert use_float8(model, CPU, torch.float32) == 0
    assert "weights stay float32, because float8 products fail: a product of 1 rows differs by 1" in caplog.text
    assert type(model.first) is torch.nn.Linear


@pytest.mark.usefixtures("products_by_row")
@pytest.mark.parametrize(("capability", "kind"), [((9, 0), Float8Linear), ((8, 0), CodeLinear)])
def test_float8_checkpoints_stay_in_float8(
    capability: tuple[int, int], kind: type, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_device, "missing_for_triton", lambda device: None)
    monkeypatch.setattr(float8, "missing_for_float8", lambda device: None if capability >= (8, 9) else "more")
    grouped = random_weight(0, "float8", 48, 64, 64, False, False)
    bias = torch.randn(48)
    made = DeviceForms(CPU, torch.bfloat16).make(grouped, bias)
    assert type(made) is kind
    assert torch.equal(made.weight, grouped.number().to(torch.bfloat16))  # type: ignore[union-attr]
    rows = torch.randn(3, 64, dtype=torch.bfloat16)
    want = rows.float() @ grouped.number().t() + bias
    assert float((made(rows).float() - want).abs().max() / want.abs().max()) < 0.05  # type: ignore[misc]
    joined = made.joined([made])  # type: ignore[union-attr, operator]
    assert torch.equal(joined(rows), torch.cat([made(rows), made(rows)], 1))  # type: ignore[misc]
    squares = random_weight(0, "float8", 48, 64, 16, False, False)
    assert type(DeviceForms(CPU, torch.bfloat16).make(squares, None)) is CodeLinear


# -- the kernels ---------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_properties_hold_in_the_interpreter() -> None:
    check_properties("tests/model/code_properties.py")


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", ["4", "4 zeros order", "8", "float8"])
@pytest.mark.parametrize(("capability", "dtype"), [(80, "bf16"), (90, "bf16"), (90, "fp16"), (100, "bf16")])
def test_kernels_compile_within_registers_and_shared_memory(
    capability: int, dtype: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels are compiled without a GPU, and must fit into the registers and the shared memory of one program."""
    from tests.lora.compiled import MAX_SPILLED, SHARED_MEMORY, usage
    from tests.model.codes_compiled import compile_all

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel in compile_all(capability, dtype, form):
        assert kernel.metadata.shared <= SHARED_MEMORY[capability], kernel.name
        registers, spilled = usage(kernel, capability, tmp_path)
        assert registers <= 255, kernel.name
        assert spilled <= MAX_SPILLED, f"{kernel.name} spills {spilled} bytes"
        code = kernel.asm["ptx"]
        if kernel.name == "join_shares":
            continue
        if kernel.name == "decode":
            assert "st.global.v4" in code, "decoding does not store 16 bytes at a time"
            continue
        assert "cp.async.cg" in code or "ld.global.v4" in code, f"{kernel.name} does not load 16 bytes at a time"
        assert "mma.sync" in code, f"{kernel.name} multiplies in matrix units"
        assert "wgmma" not in code, f"{kernel.name} multiplies by other instructions in other tiles"
        assert "tcgen05.mma" not in code


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", [2, 4, 8, "int8", "float8"])
def test_a_gpu_gives_what_torch_gives(form: Any, dtype: torch.dtype) -> None:
    for number, (has_zeros, is_ordered) in enumerate(((False, False), (True, False), (True, True))):
        grouped = random_weight(number, form, 1040, 1024, 128, has_zeros, is_ordered)
        layer = CodeLinear(make_codes(grouped), torch.randn(1040), dtype).to(CUDA)
        assert on_device.find_problem(layer) is None
        rows = torch.randn(300, 1024, device=CUDA, dtype=dtype)
        whole = layer(rows)
        for count in (1, 2, 16, 17, 64, 65):
            assert torch.equal(layer(rows[:count]), whole[:count]), "a row's bits are its own"


@pytest.mark.gpu
def test_a_gpu_multiplies_in_float8() -> None:
    if float8.missing_for_float8(CUDA) is not None:
        pytest.skip("the GPU is older than compute capability 8.9")
    assert float8.find_problem(CUDA, torch.bfloat16) is None
    assert float8.find_problem(CUDA, torch.float16) is None
