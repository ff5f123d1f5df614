"""How large the KV pool becomes: from overrides, or from the memory that is free. Bytes throughout."""

from __future__ import annotations

import psutil
import torch

from bridle.config import ModelConfig
from bridle.errors import InvalidRequest, OutOfBlocks, UnsupportedModel
from bridle.model.geometry import Geometry

#: Tokens per block. CPUs read contiguous runs of blocks as one, so small blocks cost nothing there and share
#: prefixes well; CUDA's paged flash attention wants multiples of 256.
DEFAULT_BLOCK_SIZE = {"cpu": 16, "cuda": 256}
CPU_SHARE = 0.25
CUDA_SHARE = 0.85
DEFAULT_CONTEXTS = 64
#: A pool that holds fewer tokens than this (or one whole context) is refused.
LEAST_TOKENS = 256


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def check_weights_fit(num_values: int, item_size: int, device: torch.device) -> None:
    """Refuse weights that cannot fit before reading them."""
    needed, free = num_values * item_size, free_memory(device)
    if needed > free:
        raise UnsupportedModel(
            f"the weights need {_show(needed)} ({item_size} bytes each), but {device} has {_show(free)} free"
        )


def default_block_size(config: ModelConfig, device: torch.device) -> int:
    return config.block_size or DEFAULT_BLOCK_SIZE.get(device.type, 16)


def choose_num_blocks(
    config: ModelConfig, geometry: Geometry, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> int:
    """Blocks in the pool. Raises `OutOfBlocks` with the numbers if what is asked for, or the least that makes
    sense, does not fit."""
    block_size = default_block_size(config, device)
    block_bytes = geometry.numbers_per_token * dtype.itemsize * block_size
    free = free_memory(device)
    if config.num_blocks is not None:
        _check_room(config.num_blocks * block_bytes, free, device, f"num_blocks {config.num_blocks}")
        return config.num_blocks
    if config.kv_memory is not None:
        _check_room(config.kv_memory, free, device, f"kv_memory {config.kv_memory}")
        budget = config.kv_memory
    else:
        budget = int(free * (CUDA_SHARE if device.type == "cuda" else CPU_SHARE))
        budget = budget if config.max_kv_memory is None else min(budget, config.max_kv_memory)
    wanted = DEFAULT_CONTEXTS * -(-max_model_len // block_size)
    num_blocks = min(budget // block_bytes, wanted) if config.kv_memory is None else budget // block_bytes
    _check_least(config, num_blocks * block_size, budget, block_bytes // block_size, max_model_len)
    return num_blocks


def _check_room(needed: int, free: int, device: torch.device, what: str) -> None:
    if needed > free:
        raise OutOfBlocks(f"{what} needs {_show(needed)} for the KV cache, but {device} has {_show(free)} free")


def _check_least(config: ModelConfig, tokens: int, budget: int, token_bytes: int, max_model_len: int) -> None:
    least = max_model_len if config.max_model_len is not None else min(max_model_len, LEAST_TOKENS)
    if tokens >= least:
        return
    message = (
        f"the KV cache holds {tokens} tokens in {_show(budget)} ({token_bytes} bytes per token), "
        f"but a context of {least} needs {_show(least * token_bytes)}; lower max_model_len or raise kv_memory"
    )
    if config.kv_memory is not None:
        raise InvalidRequest(message, "kv_memory")
    raise OutOfBlocks(message)


def _show(size: int) -> str:
    if size < 1 << 20:
        return f"{size} bytes"
    return f"{size / (1 << 20):.1f} MiB" if size < 1 << 30 else f"{size / (1 << 30):.1f} GiB"
