"""Smoke tests of a GPU. These tests report versions and clocks, and try each family of kernels with its compile time.
Then they load a model, and check that it uses no fallback."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from bridle.bench.roofline import wait_for_device
from bridle.lora.adapter_kernel import TriedKernel, create_adapter_kernel
from bridle.model import float8, sampler_self_test
from bridle.model.device_sampler import DeviceSampler
from bridle.model.executor import LocalExecutor
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.graph_kinds import KINDS
from bridle.model.kernels import create_kernel, self_test
from bridle.model.kernels.paged import PagedKernel
from bridle.model.memory import free_memory
from bridle.model.quantization.code_linear import CodeLinear
from bridle.model.quantization.codes import make_codes
from bridle.model.quantization.on_device import find_problem
from bridle.model.quantization.weights import Grouped
from scripts.card.models import make_executor, make_model

Figures = Iterator[dict[str, Any]]
_PACKAGES = ("bridle-llm", "torch", "triton", "transformers", "numpy", "flashinfer-python", "fa3-fwd")
_CLOCKS = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu,memory.total"
_VOCAB = 151_936
#: Heads of Llama 3 and of Qwen3-0.6B, and of gpt-oss.
_SHAPES = (LayerGeometry(32, 8, 128, 128), LayerGeometry(16, 8, 128, 128))
_SPECIAL = LayerGeometry(64, 8, 64, 64, window=128, has_sinks=True)


def smoke(device: torch.device, dtype: torch.dtype, *, quick: bool) -> Figures:
    """Report versions and clocks, and try each family of kernels."""
    yield {"what": "versions", **{name: _version(name) for name in _PACKAGES}}
    if (told := _clocks()) is not None:
        yield {"what": "nvidia-smi", "told": told}
    for name, trial in _trials(device, dtype, quick=quick).items():
        yield _tried(name, trial)


def _tried(name: str, trial: Callable[[], str | None]) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        problem = trial()
        wait_for_device()
    except Exception as failure:
        problem = f"{type(failure).__name__}: {failure}"
    return {"what": name, "seconds": time.perf_counter() - began, "failed": problem}


def _trials(device: torch.device, dtype: torch.dtype, *, quick: bool) -> dict[str, Callable[[], str | None]]:
    """Return by name a function that tries a family of kernels, for each family that this device supports. The function
    returns its error, or None."""
    geometry = Geometry(dict(enumerate((*_SHAPES, _SPECIAL))), 2)
    trials: dict[str, Callable[[], str | None]] = {
        "attention": lambda: self_test.find_problem(create_kernel("auto", device, dtype), geometry, dtype, device, 16),
        "adapters": lambda: _adapters(device, dtype),
    }
    if device.type == "cuda":
        trials |= {
            "sampler": lambda: sampler_self_test.find_problem(DeviceSampler(device), device, dtype, _VOCAB),
            "float8": lambda: float8.missing_for_float8(device) or float8.find_problem(device, dtype),
            "codes": lambda: _codes(device, dtype),
        }
    if quick:
        trials["attention"] = lambda: self_test.find_problem(
            create_kernel("auto", device, dtype), Geometry({0: LayerGeometry(4, 2, 16, 16)}, 2), dtype, device, 16
        )
    return trials


def _codes(device: torch.device, dtype: torch.dtype) -> str | None:
    """Try weights of 4 bits in groups of 128 inputs, as AWQ and GPTQ store them."""
    weight = torch.randint(16, (512, 1_024), dtype=torch.uint8, device=device)
    scales, zeros = (
        torch.rand(512, 8, device=device).half(),
        torch.randint(16, (512, 8), dtype=torch.int16, device=device),
    )
    groups = torch.arange(1_024, device=device) // 128
    return find_problem(CodeLinear(make_codes(Grouped(weight, scales, zeros, groups, 4)), None, dtype))


def _adapters(device: torch.device, dtype: torch.dtype) -> str | None:
    """Check adapters for every layer of a small model; on CUDA the fused kernels must compute them."""
    from bridle.model.adapters import ModelAdapters
    from bridle.model.lora_layers import Sites

    kernel = create_adapter_kernel("auto", device, dtype)
    adapters = ModelAdapters(Sites(make_model("toy", device, dtype, "sdpa")), dtype, device, kernel)
    with adapters.on_trial():
        pass
    is_fused = isinstance(kernel, TriedKernel) and kernel.fused is not None
    return None if is_fused or device.type != "cuda" else "adapters are computed in plain torch"


# -- a load --------------------------------------------------------------------------------------------------


def load(name: str, device: torch.device, dtype: torch.dtype) -> Figures:
    """Load a model, and report which parts use kernels and graphs, and its memory."""
    before, began = free_memory(device), time.perf_counter()
    executor = make_executor(name, device, dtype, num_tokens=8_192, num_seqs=64)[0]
    wait_for_device()
    try:
        yield {"what": "load", "seconds": time.perf_counter() - began, **ways(executor)}
        cache = executor.runner.attention.cache
        yield {
            "what": "memory",
            "predicted_pool": executor.info.num_blocks * cache.num_bytes // cache.num_blocks,
            "pool": cache.num_bytes,
            "free_before": before,
            "free_after": free_memory(device),
            "weights_and_pool": executor.num_bytes,
        }
    finally:
        executor.close()


def ways(executor: LocalExecutor) -> dict[str, Any]:
    """Return for each part of a step whether kernels or graphs compute it. On CUDA each part must have a kernel or
    graphs; a part without them is a failure."""
    runner = executor.runner
    kernel, sizes_of = runner.attention.kernel, getattr(runner.graphs, "sizes_of", lambda kind: ())
    found = {
        "attention": isinstance(kernel, PagedKernel),
        "prompts": isinstance(kernel, PagedKernel) and kernel.prompts is not None,
        "layers": runner.lowered is not None and runner.lowered.fused is not None,
        "sampler": isinstance(executor.sampler, DeviceSampler),
        **{f"graphs{kind}": bool(sizes_of(kind)) for kind in KINDS},
    }
    names = {"kernel": kernel.name, "prompt_kernel": getattr(getattr(kernel, "prompts", None), "name", None)}
    lacking = [name for name, is_there in found.items() if not is_there]
    is_gpu = executor.info.device.startswith("cuda")
    return {**names, **found, "failed": f"fell back: {', '.join(lacking)}" if lacking and is_gpu else None}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _clocks() -> str | None:
    """Return the GPU's data from `nvidia-smi`; None without that program."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ("nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader")
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout.strip()
