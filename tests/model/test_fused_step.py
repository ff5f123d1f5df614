"""Tests of fused layers, which need few kernel launches: when they are used, and their results.

If Triton is installed, the kernels run in its interpreter and are compiled for GPUs that the machine may lack.
`test_device_lint.py` counts the launches, uploads and waits of a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bridle.lora import adapter_kernel
from bridle.model import fused_step
from bridle.model.dense_layer import Norm, gelu_tanh
from bridle.model.fused_step import FusedStep, try_fused_step, warps_for
from tests.kernels import check_properties, needs_triton

CUDA = torch.device("cuda")
NORM = Norm(SimpleNamespace(weight=torch.ones(4), eps=1e-6))


# -- the choice --------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fake machine with a GPU and Triton, whose kernels pass or fail their self-test."""
    machine = SimpleNamespace(capability=(9, 0), has_triton=True, is_right=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: machine.capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=8))
    monkeypatch.setattr(adapter_kernel, "find_spec", lambda name: name if machine.has_triton else None)

    def gives_the_same(*_: object) -> bool:
        if isinstance(machine.is_right, Exception):
            raise machine.is_right
        return bool(machine.is_right)

    monkeypatch.setattr(fused_step, "_gives_the_same", gives_the_same)
    return machine


def layer(**changes: Any) -> Any:
    norms = dict.fromkeys(("norm", "last_norm", "mlp_norm", "mlp_last_norm", "head_norm"), NORM)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "num_gates": 16, "layer_idx": 0}
    settings = {
        **norms,
        **sizes,
        "products": (),
        "act": gelu_tanh,
        "is_rotated": True,
        "down": SimpleNamespace(out_features=32),
    }
    return SimpleNamespace(**{**settings, **changes})


def tried(
    device: torch.device = CUDA, is_plain: bool = False, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Any:
    cache = SimpleNamespace(device=device, layers={0: SimpleNamespace(keys=torch.empty(0, dtype=dtype))})
    attention: Any = SimpleNamespace(cache=cache, is_plain=is_plain)
    return try_fused_step([layer(**changes)], NORM, attention, torch.bfloat16)


def test_a_gpu_gets_them_and_a_cpu_does_not(gpu: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(tried(), FusedStep)
    assert tried(torch.device("cpu")) is None
    assert tried(is_plain=True) is None
    assert not caplog.text


@pytest.mark.parametrize(
    ("machine", "changes", "reason"),
    [
        ({"capability": (7, 5)}, {}, "need a GPU of compute capability 8.0"),
        ({"has_triton": False}, {}, "need Triton"),
        ({"is_right": False}, {}, "differ in layer 0"),
        ({"is_right": RuntimeError("no C compiler")}, {}, "RuntimeError: no C compiler"),
        ({}, {"act": torch.relu}, "no such activation"),
        ({}, {"head_dim": 320}, "heads up to 256"),
        ({}, {"down": SimpleNamespace(out_features=20_000)}, "rows up to 16384"),
        ({}, {"dtype": torch.int8}, "in floating point"),
    ],
)
def test_what_cannot_be_stays_plain_torch_and_the_log_says_why(
    gpu: SimpleNamespace,
    machine: dict[str, Any],
    changes: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    vars(gpu).update(machine)
    assert tried(**changes) is None
    assert reason in caplog.text


def test_a_full_device_is_no_reason(gpu: SimpleNamespace) -> None:
    gpu.is_right = torch.OutOfMemoryError()
    with pytest.raises(torch.OutOfMemoryError):
        tried()


def test_a_long_row_has_more_warps() -> None:
    assert [warps_for(block) for block in (16, 1024, 4096, 16384)] == [1, 2, 8, 16]


# -- the kernels -------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_properties_hold_in_the_interpreter() -> None:
    check_properties("tests/model/layer_properties.py")


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", range(4))
@pytest.mark.parametrize(
    ("capability", "dtype"), [(80, "bf16"), (86, "fp16"), (90, "bf16"), (90, "fp32"), (100, "bf16")]
)
def test_kernels_compile_without_spilling(
    capability: int, dtype: str, shape: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels, compiled without a GPU, must spill no registers and access memory 16 bytes at a time."""
    from tests.lora.compiled import usage
    from tests.model.layer_compiled import SHAPES, compile_all

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel in compile_all(capability, dtype, SHAPES[shape]):
        registers, spilled = usage(kernel, capability, tmp_path)
        assert registers <= 255, kernel.name
        assert spilled == 0, f"{kernel.name} spills {spilled} bytes"
        code = kernel.asm["ptx"]
        assert "ld.global.v4" in code, f"{kernel.name} does not load 16 bytes at a time"
        assert "st.global.v4" in code, f"{kernel.name} does not store 16 bytes at a time"
