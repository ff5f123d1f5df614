"""Chooses how a device multiplies adapters, and tests the fused way before steps rely on it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec

import torch

from bridle.errors import InvalidRequest, ModelUnavailable
from bridle.lora.fused import FusedProducts, is_interpreted
from bridle.lora.product import Product, Products, Segment
from bridle.lora.torch_product import TorchProducts
from bridle.lora.trial import Trial
from bridle.lora.weights import PlacedAdapter

_log = logging.getLogger(__name__)

KERNELS = ("auto", "fused", "torch")
#: The lowest compute capability whose matrix units Triton supports.
LEAST_CAPABILITY = (8, 0)


def create_products(name: str, device: torch.device, dtype: torch.dtype) -> Products:
    """Make the way of multiplying called `name`. `auto` is `fused` on CUDA, as long as it gives what `torch` gives, and
    `torch` elsewhere.

    Raises `InvalidRequest` for an unknown name, or for a way that this device cannot run.
    """
    if name not in KERNELS:
        raise InvalidRequest(f"adapter_kernel is {name!r}; must be one of {', '.join(KERNELS)}", "adapter_kernel")
    missing = None if name == "torch" else missing_for_triton(device)
    if name == "fused" and missing is not None:
        raise InvalidRequest(f"adapter_kernel 'fused' needs {missing}; this is {device}", "adapter_kernel")
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return TorchProducts()
    if missing is not None:
        _log.warning("adapters are multiplied in plain torch, as the fused kernels need %s", missing)
        return TorchProducts()
    return TriedProducts(FusedProducts(device), Trial(device, dtype), TorchProducts() if name == "auto" else None)


def missing_for_triton(device: torch.device) -> str | None:
    """What this device lacks to run kernels in Triton; None if it lacks nothing."""
    if find_spec("triton") is None:
        return "Triton, which torch for CUDA brings along"
    if is_interpreted():
        return None
    if device.type != "cuda":
        return "CUDA"
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return f"a GPU of compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}"
    return None


class TriedProducts:
    """Fused products, each kind of which is first compared with plain torch.

    After the first kind whose result differs, `fallback` multiplies. Without a fallback, adapters of that kind are
    refused.
    """

    def __init__(self, fused: Products, trial: Trial, fallback: Products | None) -> None:
        self._products = self._fused = fused
        self._trial = trial
        self._fallback = fallback

    def prepare(self, adapter: PlacedAdapter) -> None:
        """Test the kinds of products that are new in this adapter's layout. The test compiles kernels, which takes
        seconds the first time."""
        if self._products is not self._fused:
            return
        problem = self._problem(adapter)
        if problem is None:
            return
        if self._fallback is None:
            raise ModelUnavailable(f"the fused kernels fail here, try adapter_kernel 'auto': {problem}")
        self._products = self._fallback
        _log.warning("adapters are multiplied in plain torch, as the fused kernels fail here: %s", problem)

    def _problem(self, adapter: PlacedAdapter) -> str | None:
        try:
            self._fused.prepare(adapter)
            return self._trial.run(adapter.layout, self._fused)
        except torch.OutOfMemoryError:
            raise  # that may pass
        except Exception as error:  # a compiler, its cache or a driver may fail in many ways
            return f"{type(error).__name__}: {error}"

    def of(self, segments: Sequence[Segment]) -> list[Product]:
        return self._products.of(segments)

    def clear(self) -> None:
        self._products.clear()
