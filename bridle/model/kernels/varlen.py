"""Attention on CUDA in half precision: one call of torch's variable-length flash attention per layer. This kernel is
used only on request, because `paged` supports all page sizes and all kinds of layers. The kernel reads the pool through
the block table. A batch row's keys are not split among programs, so the row's result does not depend on other rows in
the batch. Plain torch computes layers with soft-capping, sinks or values narrower than keys, and KV blocks of sizes
that the kernel does not support.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from bridle.model.batch_inputs import PackedStep
from bridle.model.forward_context import AttentionOptions
from bridle.model.h2d_copies import upload_list
from bridle.model.kernels.cpu import CpuKernel
from bridle.model.kv_cache import LayerCache

#: Flash attention supports only page sizes that are multiples of this number of tokens.
PAGE_MULTIPLE = 256
MAX_HEAD_DIM = 256
#: Arguments that older versions of torch's functions lack.
_NEEDED = frozenset({"enable_gqa", "seqused_k", "block_table", "num_splits"})


class VarlenKernel:
    """Flash attention over the block table, with a fallback for layers that it does not support."""

    name = "varlen"

    def __init__(self) -> None:
        self._fallback = CpuKernel()
        self._step: PackedStep | None = None
        self._table: Tensor | None = None  # [N, longest table] int32

    def begin(self, step: PackedStep) -> None:
        self._fallback.begin(step)
        self._step = step
        device = step.slots.device
        ends = [0]
        for row in step.rows:
            ends.append(row.offset + row.length)
        self._ends = upload_list(ends, torch.int32, device)  # [N + 1]
        self._contexts = upload_list([row.context for row in step.rows], torch.int32, device)  # [N]
        self._longest_row = max(row.length for row in step.rows)
        self._longest_context = max(row.context for row in step.rows)
        self._table = _block_table(step).to(device)

    def attend(self, query: Tensor, cache: LayerCache, options: AttentionOptions) -> Tensor:
        if not _is_flash_case(query, cache, options):
            return self._fallback.attend(query, cache, options)
        from torch.nn.attention.varlen import varlen_attn

        assert self._table is not None
        size = cache.block_size
        # The kernel's left window does not count the own token; `options.window` does.
        left = -1 if options.window is None else options.window - 1
        out = varlen_attn(
            query.contiguous(),  # [T, Hq, D]
            cache.keys.view(-1, size, *cache.keys.shape[1:]),  # [blocks, B, Hkv, D]
            cache.values.view(-1, size, *cache.values.shape[1:]),
            self._ends,
            None,
            self._longest_row,
            self._longest_context,
            scale=options.scaling,
            window_size=(left, 0),
            enable_gqa=True,
            seqused_k=self._contexts,
            block_table=self._table,
            num_splits=1,
        )
        assert isinstance(out, Tensor)
        return out  # [T, Hq, Dv]


def missing_for_varlen(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return a requirement of this kernel that the device or torch does not meet, or None."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return f"CUDA and half precision; this is {dtype} on {device}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "a GPU of compute capability 8.0"
    try:
        from torch.nn.attention import varlen
    except ImportError:
        known = frozenset[str]()
    else:
        known = frozenset(inspect.signature(varlen.varlen_attn).parameters)
    if not known >= _NEEDED:
        lacking = ", ".join(sorted(_NEEDED - known))
        return f"a torch whose varlen_attn knows {lacking} (2.12 or newer); this is {torch.__version__}"
    return None


def _is_flash_case(query: Tensor, cache: LayerCache, options: AttentionOptions) -> bool:
    dim = query.shape[-1]
    return (
        options.softcap is None
        and options.sinks is None
        and dim == cache.values.shape[-1]
        and dim % 8 == 0
        and dim <= MAX_HEAD_DIM
        and cache.block_size % PAGE_MULTIPLE == 0
    )


def _block_table(step: PackedStep) -> Tensor:
    """Return block tables [N, longest table], int32. Block tables of shorter sequences are padded with block 0. No row
    reads the padding of its table, because the padding is after the row's context."""
    longest = max(len(row.mirror.blocks) for row in step.rows)
    table = torch.zeros(len(step.rows), longest, dtype=torch.int32)
    for number, row in enumerate(step.rows):
        blocks = row.mirror.blocks
        table[number, : len(blocks)] = torch.frombuffer(blocks, dtype=torch.int32)
    return table
