"""Chooses the kernel that multiplies adapters on a device, and tests the fused kernel before steps use it. The fused
kernel's products are compared with plain torch on random numbers, once for each shape of an adapted layer (site).
Trials of the fused kernel have few rows, many rows, or both, and some rows without an adapter in between. A trial takes
as much memory as an adapter's weights for one site.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from bridle.errors import InvalidRequest, ModelUnavailable
from bridle.lora.fused import FusedKernel, is_interpreted
from bridle.lora.layout import AdapterBlock, AdapterLayout, LayerPart
from bridle.lora.ops import AdapterKernel, AdapterStep, Product, Segment
from bridle.lora.torch_ops import TorchKernel
from bridle.lora.weights import PlacedAdapter

_log = logging.getLogger(__name__)

KERNELS = ("auto", "fused", "torch")
#: The lowest compute capability whose matrix units Triton supports.
LEAST_CAPABILITY = (8, 0)
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
#: The lengths of the segments in each trial. One row without an adapter precedes each segment.
_TRIALS = ((1, 3), (70, 1))


def create_adapter_kernel(name: str, device: torch.device, dtype: torch.dtype) -> AdapterKernel:
    """Make the adapter kernel called `name`. `auto` is the kernel `fused` on CUDA if it gives the same results as the
    kernel `torch`, and `torch` otherwise.

    Raises `InvalidRequest` for an unknown name, or for a kernel that this device cannot run.
    """
    if name not in KERNELS:
        raise InvalidRequest(f"adapter_kernel is {name!r}; must be one of {', '.join(KERNELS)}", "adapter_kernel")
    missing = None if name == "torch" else missing_for_triton(device)
    if name == "fused" and missing is not None:
        raise InvalidRequest(f"adapter_kernel 'fused' needs {missing}; this is {device}", "adapter_kernel")
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return TorchKernel()
    if missing is not None:
        _log.warning("adapters are computed in plain torch, because the fused kernels need %s", missing)
        return TorchKernel()
    return TriedKernel(FusedKernel(device), device, dtype, TorchKernel() if name == "auto" else None)


def missing_for_triton(device: torch.device) -> str | None:
    """Return the reason why this device cannot run Triton kernels; None if it can."""
    if find_spec("triton") is None:
        return "Triton, which torch for CUDA brings along"
    if is_interpreted():
        return None
    if device.type != "cuda":
        return "CUDA"
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return f"a GPU of compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}"
    return None


class TriedKernel:
    """The fused kernel with a self-test: each kind of product is compared with plain torch before steps use it. After
    the first wrong result, `fallback` multiplies all adapters. Without `fallback`, adapters that need this kind of
    product are refused.
    """

    def __init__(
        self, fused: AdapterKernel, device: torch.device, dtype: torch.dtype, fallback: AdapterKernel | None
    ) -> None:
        self._kernel = self._fused = fused
        self._device = device
        self._dtype = dtype
        self._fallback = fallback
        self._tried: set[AdapterBlock] = set()

    def prepare(self, adapter: PlacedAdapter) -> None:
        """Test the kinds of products in this adapter's layout that were not tested before. The test compiles kernels,
        which takes seconds the first time."""
        if self._kernel is not self._fused:
            return
        problem = self._problem(adapter)
        if problem is None:
            return
        if self._fallback is None:
            raise ModelUnavailable(f"the fused LoRA kernels fail here; set adapter_kernel to 'auto': {problem}")
        self._kernel = self._fallback
        _log.warning("adapters are computed in plain torch, because the fused kernels fail here: %s", problem)

    @property
    def fused(self) -> FusedKernel | None:
        """Return the fused kernel, or None after `fallback` has replaced it."""
        return self._kernel if isinstance(self._kernel, FusedKernel) else None

    def products(self, segments: Sequence[Segment]) -> list[Product]:
        return self._kernel.products(segments)

    def clear(self) -> None:
        self._kernel.clear()

    def _problem(self, adapter: PlacedAdapter) -> str | None:
        try:
            self._fused.prepare(adapter)
            for block in map(_alone, adapter.layout.blocks.values()):
                if block not in self._tried:
                    for lengths in _TRIALS:
                        problem = self._try(block, lengths)
                        if problem is not None:
                            return problem
                    self._tried.add(block)
        except torch.OutOfMemoryError:
            raise  # the error may be temporary
        except Exception as error:  # a compiler, its cache or a driver may fail in many ways
            return f"{type(error).__name__}: {error}"
        return None

    def _try(self, block: AdapterBlock, lengths: tuple[int, ...]) -> str | None:
        generator = torch.Generator().manual_seed(block.rank)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self._device, self._dtype)

        layout = AdapterLayout({0: block}, block.end)
        segments, stop = [], 0
        for length in lengths:
            # At this scale, the hidden sums and the addends are about as large as the outputs to which they are added.
            flat = random(layout.num_values) / math.sqrt(math.sqrt(block.num_inputs * block.rank))
            segments.append(Segment(stop + 1, stop + 1 + length, PlacedAdapter(layout, flat)))
            stop += 1 + length
        rows, base = random(stop + 1, block.num_inputs), random(stop + 1, block.parts[-1].columns.end)
        want, have = base.clone(), base.clone()
        with torch.inference_mode():
            for way, out in ((TorchKernel(), want), (self._fused, have)):
                AdapterStep(segments, stop + 1, way).add(0, out, rows)
        error = float((want.float() - have.float()).abs().max())
        limit = TOLERANCES[self._dtype] * max(1.0, float(want.abs().max()))
        if error <= limit:  # false for NaN
            return None
        return f"rank {block.rank} over {block.num_inputs} features differs by {error:.3g} (limit {limit:.3g})"


def _alone(block: AdapterBlock) -> AdapterBlock:
    """Return a layout with a single block of the same shape as `block`, whose layers have no names."""
    parts = tuple(LayerPart("", part.columns, part.ranks, part.begin - block.begin) for part in block.parts)
    return AdapterBlock(0, block.rank, block.num_inputs, parts)
