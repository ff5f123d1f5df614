"""Attention kernels over the paged cache, and the choice among them."""

from __future__ import annotations

import torch

from bridle.errors import InvalidRequest
from bridle.model.kernels.interface import AttentionKernel

__all__ = ["KERNELS", "AttentionKernel", "create_kernel"]

KERNELS = ("auto", "cpu", "reference", "varlen")


def create_kernel(name: str, device: torch.device, dtype: torch.dtype) -> AttentionKernel:
    """The kernel called `name`; `auto` is `varlen` on CUDA in half precision and `cpu` elsewhere.

    Raises `InvalidRequest` for an unknown name, or one that this device cannot run.
    """
    if name not in KERNELS:
        raise InvalidRequest(f"kernel is {name!r}; must be one of {', '.join(KERNELS)}", "kernel")
    can_varlen = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    if name == "varlen" and not can_varlen:
        raise InvalidRequest(f"kernel 'varlen' needs CUDA and half precision; this is {dtype} on {device}", "kernel")
    if name == "reference":
        from bridle.model.kernels.reference import ReferenceKernel

        return ReferenceKernel()
    if name == "varlen" or (name == "auto" and can_varlen):
        from bridle.model.kernels.varlen import VarlenKernel

        return VarlenKernel()
    from bridle.model.kernels.cpu import CpuKernel

    return CpuKernel()
