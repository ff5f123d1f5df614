"""Copies blocks of a KV cache on CUDA. One kernel launch, after one upload of the block numbers, copies the keys and
values of all layers.

Blocks are copied when a sequence forks, and when a sequence writes to a block that other sequences read. The copy
kernel is tested while a model loads. If the test fails, plain torch copies the blocks, one layer after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bridle.lora.adapter_kernel import missing_for_triton
from bridle.lora.fused import Machine
from bridle.model.h2d_copies import upload

_log = logging.getLogger(__name__)

#: Words of 8 bytes that one program copies.
WORDS = 1024
_WORD = 8
_TRIAL_BLOCKS, _TRIAL_SIZES = 5, (16, 1040)


class BlockPools:
    """The addresses of the memory pools whose blocks are copied together. A pool has the shape [blocks, bytes of a
    block]."""

    def __init__(self, pools: Sequence[Tensor], device: torch.device) -> None:
        words = [pool.stride(0) * pool.element_size() // _WORD for pool in pools]
        self.count, self.largest = len(pools), max(words)
        self.table = upload(np.array([*zip(map(Tensor.data_ptr, pools), words, strict=True)], np.int64), device)


class BlockCopier:
    """Copies KV blocks within memory pools on one device."""

    def __init__(self, device: torch.device) -> None:
        self.machine = Machine(device)

    @cached_property
    def kernels(self) -> Any:
        """Return the module of Triton kernels. The import takes a moment, and needs Triton."""
        from bridle.model.kernels import block_copy_kernels

        return block_copy_kernels

    def copy(self, pairs: Tensor, pools: BlockPools) -> None:
        """In every pool, copy block `source` to block `target` for each (source, target) of `pairs` [N, 2]. No block
        may be both source and target."""
        grid = (pairs.shape[0], pools.count, -(-pools.largest // WORDS))
        with self.machine.chosen():
            self.kernels.copy_blocks[grid](pairs, pools.table, block=WORDS, num_warps=4)


def tried_copier(device: torch.device) -> BlockCopier | None:
    """Return a copier after a test. Return None on CPUs, or if the test fails; the log then has the reason."""
    missing = missing_for_triton(device)
    if device.type != "cuda" or missing is not None:
        return None  # the attention kernel has already logged why Triton is missing
    problem = find_problem(BlockCopier(device), device)
    if problem is None:
        return BlockCopier(device)
    _log.warning("KV blocks on %s are copied in plain torch, one layer after the other: %s", device, problem)
    return None


def find_problem(copier: BlockCopier, device: torch.device) -> str | None:
    """Test the copier; return a description of its problem, or None."""
    try:
        pools = [
            torch.arange(_TRIAL_BLOCKS * size, device=device).view(_TRIAL_BLOCKS, size).clone() for size in _TRIAL_SIZES
        ]
        want = [pool[[0, 0, 2, 3, 3]] for pool in pools]
        copier.copy(upload(np.array([(0, 1), (3, 4)], np.int64), device), BlockPools(pools, device))
        if all(map(torch.equal, want, pools)):
            return None
    except torch.OutOfMemoryError:
        raise  # the error may be temporary
    except Exception as failure:  # a compiler, its cache, a driver
        return f"{type(failure).__name__}: {failure}"
    return "the kernel copies other blocks"
