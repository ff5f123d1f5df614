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
#: Of the oldest GPUs whose matrix units Triton knows.
LEAST_CAPABILITY = (8, 0)


def create_products(name: str, device: torch.device, dtype: torch.dtype) -> Products:
    """The way called `name`; `auto` is `fused` on CUDA, as long as it gives what `torch` gives, and `torch` elsewhere.

    Raises `InvalidRequest` for an unknown name, or one that this device cannot run.
    """
    if name not in KERNELS:
        raise InvalidRequest(f"adapter_kernel is {name!r}; must be one of {', '.join(KERNELS)}", "adapter_kernel")
    missing = None if name == "torch" else _missing(device)
    if name == "fused" and missing is not None:
        raise InvalidRequest(f"adapter_kernel 'fused' needs {missing}; this is {device}", "adapter_kernel")
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return TorchProducts()
    if missing is not None:
        _log.warning("adapters are multiplied in plain torch, as the fused kernels need %s", missing)
        return TorchProducts()
    return TriedProducts(FusedProducts(device), Trial(device, dtype), TorchProducts() if name == "auto" else None)


def _missing(device: torch.device) -> str | None:
    """What the fused kernels lack here."""
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
