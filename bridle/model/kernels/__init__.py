"""Attention kernels over the paged KV cache, and the function that chooses one."""

from __future__ import annotations

import logging

import torch

from bridle.cpu_kernels.library import choice, kernels
from bridle.errors import InvalidRequest
from bridle.lora.adapter_kernel import missing_for_triton
from bridle.model.kernels.interface import AttentionKernel

__all__ = ["KERNELS", "AttentionKernel", "create_kernel"]

_log = logging.getLogger(__name__)

KERNELS = ("auto", "cpu", "native", "paged", "reference", "varlen")


def create_kernel(name: str, device: torch.device, dtype: torch.dtype) -> AttentionKernel:
    """Return the kernel called `name`. `auto` is `paged` on CUDA if Triton can run, `native` on a CPU that the C
    kernels support, and plain torch (`cpu`) otherwise. Raises `InvalidRequest` for an unknown name, and for a kernel
    that this device cannot run, with the reason.
    """
    if name not in KERNELS:
        raise InvalidRequest(f"kernel is {name!r}; must be one of {', '.join(KERNELS)}", "kernel")
    if name == "reference":
        from bridle.model.kernels.reference import ReferenceKernel

        return ReferenceKernel()
    if name == "varlen":
        from bridle.model.kernels.varlen import VarlenKernel, missing_for_varlen

        _require("varlen", missing_for_varlen(device, dtype))
        return VarlenKernel()
    if name == "paged" or (name == "auto" and device.type == "cuda"):
        missing = missing_for_triton(device)
        if name == "paged":
            _require("paged", missing)
        if missing is None:
            from bridle.model.kernels.paged import PagedKernel

            return PagedKernel(device)
        _log.warning("attention on %s is plain torch, one sequence at a time: kernel 'paged' needs %s", device, missing)
    if name == "native" or (name == "auto" and device.type == "cpu"):
        found = kernels() if device.type == "cpu" else None
        if found is not None:
            from bridle.model.kernels.native import NativeKernel

            return NativeKernel(found)
        if name == "native":
            _require(name, f"a CPU and kernels for it; the device is {device}, the kernels: {choice().reason}")
    from bridle.model.kernels.cpu import CpuKernel

    return CpuKernel()


def _require(name: str, missing: str | None) -> None:
    if missing is not None:
        raise InvalidRequest(f"kernel {name!r} needs {missing}", "kernel")
