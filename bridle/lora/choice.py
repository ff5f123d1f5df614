"""Which way of multiplying adapters a device gets, and how the fused one is proven before steps rely on it."""

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


def create_products(name: str, device: torch.device, dtype: torch.dtype) -> Products:
    """The way called `name`; `auto` is `fused` on CUDA, as long as it gives what `torch` gives, and `torch` elsewhere.

    Raises `InvalidRequest` for an unknown name, or one that this device cannot run.
    """
    if name not in KERNELS:
        raise InvalidRequest(f"adapter_kernel is {name!r}; must be one of {', '.join(KERNELS)}", "adapter_kernel")
    has_triton = find_spec("triton") is not None
    can_fuse = has_triton and (device.type == "cuda" or is_interpreted())
    if name == "fused" and not can_fuse:
        missing = "CUDA" if has_triton else "Triton, which torch for CUDA brings along"
        raise InvalidRequest(f"adapter_kernel 'fused' needs {missing}; this is {device}", "adapter_kernel")
    if not can_fuse and name == "auto" and device.type == "cuda":
        _log.warning("Triton is not installed: adapters are multiplied in plain torch")
    if name == "fused":
        return TriedProducts(FusedProducts(device), Trial(device, dtype), None)
    if name == "auto" and can_fuse and device.type == "cuda":
        return TriedProducts(FusedProducts(device), Trial(device, dtype), TorchProducts())
    return TorchProducts()


class TriedProducts:
    """Fused products, as long as each kind of product that they meet gives what plain torch gives. From the first that
    does not, `fallback` multiplies; without one, adapters of that kind cannot be used."""

    def __init__(self, fused: Products, trial: Trial, fallback: Products | None) -> None:
        self._products = self._fused = fused
        self._trial = trial
        self._fallback = fallback

    def prepare(self, adapter: PlacedAdapter) -> None:
        """Try what is new in this adapter's layout: that compiles the kernels, which takes seconds the first time."""
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
        except Exception as error:  # a compiler, its cache, a driver: there are many ways to fail
            return f"{type(error).__name__}: {error}"

    def of(self, segments: Sequence[Segment]) -> list[Product]:
        return self._products.of(segments)

    def clear(self) -> None:
        self._products.clear()
