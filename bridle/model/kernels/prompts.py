"""Attention for long chunks by external kernels, such as FlashAttention: one sequence at a time, over its gathered keys
and values. External kernels are faster than `paged_prefill` on the GPUs that they are written for. External kernels
support only some page sizes, so a sequence's keys and values are first gathered into contiguous memory. Gathering takes
little time compared with the matrix products of a long chunk. One call computes one sequence, so its result does not
depend on the other sequences of a step. `prompt_choice` selects the kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bridle.model.forward_context import AttentionOptions

#: Minimum number of tokens of a sequence in a step for which a library's kernel is faster, despite the gather and the
#: separate call. Shorter chunks may be in a CUDA graph, which uses bridle's own kernel: a chunk's result does not
#: depend on the graphs that exist.
MIN_TOKENS = 513

#: Attention of the last L of C tokens: query [L, Hq, D], keys and values [C, Hkv, D] and options -> [L, Hq, D].
Attend = Callable[[Tensor, Tensor, Tensor, AttentionOptions], Tensor]


@dataclass(frozen=True, slots=True)
class PromptKernel:
    """An external attention kernel. `has_window` means that it supports sliding windows."""

    name: str
    attend: Attend
    has_window: bool = False

    def takes(self, options: AttentionOptions, dim: int, value_dim: int) -> bool:
        """Return whether the kernel supports layers with these options and head sizes."""
        is_plain = options.softcap is None and options.sinks is None
        return is_plain and dim == value_dim and dim % 8 == 0 and (options.window is None or self.has_window)


def candidates(dtype: torch.dtype) -> Iterator[PromptKernel]:
    """Yield the kernels that may be installed, the fastest first."""
    if dtype is torch.bfloat16 and find_spec("fa3_fwd_interface") is not None:
        with suppress(Exception):  # built for another torch
            function = import_module("fa3_fwd_interface").flash_attn_func
            yield PromptKernel("FlashAttention-3", lambda *call: flash3(function, *call))
    yield PromptKernel("cuDNN", cudnn)
    if _has_varlen():
        yield PromptKernel("varlen_attn", varlen, has_window=True)
    yield PromptKernel("FlashAttention-2", flash)


def _by_head(query: Tensor, keys: Tensor, values: Tensor, scaling: float, **mask: Any) -> Tensor:
    """Compute torch's scaled dot product attention over views [1, H, L, D] of [L, H, D]."""
    query, keys, values = (part.transpose(0, 1).unsqueeze(0) for part in (query, keys, values))
    is_grouped = query.shape[1] != keys.shape[1]
    out = scaled_dot_product_attention(query, keys, values, scale=scaling, enable_gqa=is_grouped, **mask)
    return out[0].transpose(0, 1)


def flash(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Compute attention by torch's FlashAttention-2. The mask aligns the last token with the end of the context."""
    from torch.nn.attention.bias import causal_lower_right  # loads torch's compiler, which a CPU never needs

    length, context = len(query), len(keys)
    mask = {"is_causal": True} if length == context else {"attn_mask": causal_lower_right(length, context)}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _by_head(query, keys, values, options.scaling, **mask)


def cudnn(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Compute attention by cuDNN if the chunk is the whole context, and by `flash` otherwise. Chunks after the first
    one need a mask, which torch cannot pass to cuDNN."""
    if len(query) != len(keys):
        return flash(query, keys, values, options)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _by_head(query, keys, values, options.scaling, is_causal=True)


def varlen(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Compute attention of one sequence by torch's FlashAttention-2 for packed sequences."""
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.arange(2, dtype=torch.int32, device=query.device)
    left = -1 if options.window is None else options.window - 1  # varlen_attn does not count the own token
    out = varlen_attn(
        query.contiguous(),
        keys,
        values,
        ends * len(query),
        ends * len(keys),
        len(query),
        len(keys),
        scale=options.scaling,
        window_size=(left, 0),
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


def flash3(function: Any, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    out = function(
        query.contiguous().unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        softmax_scale=options.scaling,
        causal=True,
    )
    out = out[0] if isinstance(out, tuple) else out  # some releases also give the sums of weights
    assert isinstance(out, Tensor)
    return out[0]


def _has_varlen() -> bool:
    """Return whether torch's `varlen_attn` supports grouped heads and windows (torch 2.12)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"enable_gqa", "window_size"} <= set(inspect.signature(varlen_attn).parameters)
