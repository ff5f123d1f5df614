"""Determines the size of the KV pool. The pool has the requested size; by default, it has the size that the model can
use and that the largest step leaves free. To measure the memory of the largest step, this module runs it in a trial
pool. The trial pool holds one full context and one block for every other sequence. On a GPU, the trial pool takes at
most half of the free memory, and is halved until the largest step fits, too. The peak memory of this step is then
reserved, and `choose_room` computes the pool's size from the remaining memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from bridle.config import ModelConfig
from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.warm_up import LargestStep, run_largest_step
from bridle.errors import BridleError, InvalidRequest, OutOfBlocks
from bridle.file_cache import FileCache
from bridle.model.executor import LocalExecutor
from bridle.model.geometry import Geometry
from bridle.model.kv_budget import SHARE, KVBudget, choose_room
from bridle.model.memory import free_memory, release_cached, run_with_peak, show_bytes
from bridle.model.state_pool import state_bytes
from bridle.model.tensor_parallel import agree_on_least, num_ranks

_log = logging.getLogger(__name__)

#: Tokens per block. Small blocks share prefixes well. CPUs, which read runs of blocks as one, and bridle's CUDA kernels
#: read small blocks as fast as large ones. Torch's own flash attention needs multiples of 256.
DEFAULT_BLOCK_SIZE = 16
VARLEN_BLOCK_SIZE = 256
#: A pool is refused if it holds fewer tokens than this, or fewer than one whole context if its length was requested.
LEAST_TOKENS = 256
#: On a CPU a full context may take minutes. So the trial's context is at most this many times as long as a step.
_CPU_CONTEXT = 16
#: Factors by which a pool shrinks if the largest step does not fit as well: the real pool, and the trial pool.
_SHRINK, _TRIAL_SHRINK = 0.9, 0.5
#: Maximum share of a GPU's free memory for the trial pool: the step's memory hardly depends on its context.
_TRIAL_SHARE = 0.5
#: Minimum number of states of a model with recurrent layers.
LEAST_STATES = 4
#: Number of blocks per state for a model that has only recurrent layers.
BLOCKS_PER_STATE = 64
#: For models with fewer bytes of weights, the largest step takes almost no time.
LEAST_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class PoolNeeds:
    """The values that determine the size of a KV pool. `block_bytes` is the size of a KV block in all layers, plus the
    memory for recurrent states per block. The largest step has `step_tokens` tokens of `step_seqs` sequences.
    `weight_bytes` is the size of the weights in memory."""

    config: ModelConfig
    device: torch.device
    block_size: int
    block_bytes: int
    max_model_len: int
    step_tokens: int
    step_seqs: int
    media_bytes: int = 0  # for the features of images
    weight_bytes: int = 0
    key: str | None = None  # of the model: the largest step of the same key takes the same memory

    @property
    def num_sharers(self) -> int:
        """Return the number of processes that share the device's memory."""
        ranks = num_ranks() if self.device.type == "cpu" else 1
        return self.config.num_sharers * ranks

    @property
    def reserved(self) -> int:
        """Return the bytes that all processes together leave free. If the operator set the number of blocks, only the
        bytes of this process count, because other processes may already have allocated their memory."""
        num_sharers = self.num_sharers if self.config.num_blocks is None else 1
        return num_sharers * ((self.config.reserved_memory or 0) + self.media_bytes)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class StateNeeds:
    """The bytes of one sequence's recurrent state; 0 if the model has none. States get the same amount of memory as KV
    blocks, but there is at most one state per block."""

    num_bytes: int

    @classmethod
    def of(cls, geometry: Geometry) -> StateNeeds:
        return cls(state_bytes(geometry.states))

    def bytes_beside(self, block_bytes: int) -> int:
        """Return the bytes for states per KV block of `block_bytes` bytes. In models without attention, a block has no
        KV and only counts tokens."""
        return min(block_bytes, self.num_bytes) if block_bytes else max(self.num_bytes // BLOCKS_PER_STATE, 1)

    def num_slots(self, num_blocks: int, block_bytes: int) -> int:
        """Return the number of recurrent states to allocate with `num_blocks` KV blocks."""
        return max(num_blocks * self.bytes_beside(block_bytes) // max(self.num_bytes, 1), LEAST_STATES)


def default_block_size(config: ModelConfig) -> int:
    return config.block_size or (VARLEN_BLOCK_SIZE if config.kernel == "varlen" else DEFAULT_BLOCK_SIZE)


#: Replaces the pool by one of this many blocks, and returns an executor over it.
Allocate = Callable[[int], LocalExecutor]


#: Returns the bytes that the graphs of a model take in addition to its pool.
Measure = Callable[[ExecutorInfo], int]


def fit_pool(needs: PoolNeeds, allocate: Allocate, graph_bytes: Measure | None = None) -> int:
    """Allocate the KV pool, and return its number of blocks. Memory for CUDA graphs stays free. Raises `OutOfBlocks` or
    `InvalidRequest`, with the sizes, if the requested or the smallest useful size does not fit."""
    num_blocks = _explicit(needs)
    if num_blocks is not None:
        num_blocks = agree_on_least(num_blocks, needs.device)
        executor = allocate(num_blocks)
        if needs.config.warm_up and needs.config.num_blocks is None:  # with this, the operator has tried it already
            found, step_bytes = _try_step(needs, executor)
            told = _told_step(needs, found, step_bytes, free_memory(needs.device))
            _tell(needs, told, num_blocks, "as was asked for")
    elif needs.config.warm_up:
        num_blocks = _measure(needs, allocate, graph_bytes)
    else:
        room = _room(needs, free_memory(needs.device))
        num_blocks = agree_on_least(_in_blocks(needs, room.num_bytes), needs.device)
        allocate(num_blocks)
        _tell(needs, "", num_blocks, _why(room))
    num_tokens = num_blocks * needs.block_size
    if num_tokens < needs.max_model_len:
        _log.warning(
            "the KV cache holds %d tokens, less than the model's context of %d: longer requests are refused",
            num_tokens,
            needs.max_model_len,
        )
    return num_blocks


# -- as asked for ------------------------------------------------------------------------------------------


def _explicit(needs: PoolNeeds) -> int | None:
    config = needs.config
    if config.num_blocks is not None:
        _check_room(needs, config.num_blocks * needs.block_bytes, f"num_blocks {config.num_blocks}")
        return config.num_blocks
    if config.kv_tokens is not None:
        num_blocks = needs.blocks_for(config.kv_tokens)
        _check_room(needs, num_blocks * needs.block_bytes, f"room for {config.kv_tokens} tokens")
        return _checked(needs, num_blocks, num_blocks * needs.block_bytes)
    if config.kv_memory is not None:
        _check_room(needs, config.kv_memory, f"kv_memory {config.kv_memory}")
        return _checked(needs, config.kv_memory // needs.block_bytes, config.kv_memory)
    return None


def _check_room(needs: PoolNeeds, num_bytes: int, what: str) -> None:
    free = free_memory(needs.device)
    if num_bytes > free - needs.reserved:
        raise OutOfBlocks(
            f"{what} needs {show_bytes(num_bytes)} for the KV cache, but {needs.device} has {show_bytes(free)} free"
            f"{_set_aside(needs)}"
        )


def _set_aside(needs: PoolNeeds) -> str:
    """Return a text for messages about memory that is reserved for other uses than the KV pool."""
    if not needs.reserved:
        return ""
    what = "adapters (adapter_memory, adapter_host_memory)" + (" and images" if needs.media_bytes else "")
    return f", of which {show_bytes(needs.reserved)} are for {what}"


def _checked(needs: PoolNeeds, num_blocks: int, num_bytes: int) -> int:
    """Return `num_blocks` if a request of the maximum length fits into this number of blocks; raise an error
    otherwise."""
    config, num_tokens = needs.config, num_blocks * needs.block_size
    least = needs.max_model_len if config.max_model_len is not None else min(needs.max_model_len, LEAST_TOKENS)
    if num_tokens >= least:
        return num_blocks
    token_bytes = needs.block_bytes // needs.block_size
    knob = "kv_memory" if config.kv_tokens is None else "max_batch_total_tokens"
    message = (
        f"the KV cache holds {num_tokens} tokens in {show_bytes(num_bytes)} ({token_bytes} bytes per token), but a "
        f"request of {least} tokens needs {show_bytes(least * token_bytes)}; lower max_model_len or raise {knob}"
    )
    if needs.reserved:
        message += f", or lower adapter_memory and adapter_host_memory: {show_bytes(needs.reserved)} are for adapters"
    if config.kv_memory is None and config.kv_tokens is None:
        raise OutOfBlocks(message)
    raise InvalidRequest(message, knob)


# -- as measured -------------------------------------------------------------------------------------------


def _measure(needs: PoolNeeds, allocate: Allocate, graph_bytes: Measure | None) -> int:
    """Run the largest step in a trial pool, then allocate the real pool, and return its number of blocks. On CUDA, step
    and pool must fit together, so the pool is made smaller until both fit."""
    beside, known = 0, recall_step(needs)
    if known is None:
        executor, known = _run_trial(needs, allocate)
        remember_step(needs, known)
        beside = 0 if graph_bytes is None else graph_bytes(executor.info)
        allocate(1)  # frees the trial pool
    found, step_bytes = known
    free = free_memory(needs.device)
    room = _room(needs, free - step_bytes - beside)
    num_blocks = agree_on_least(_in_blocks(needs, room.num_bytes), needs.device)
    executor = allocate(num_blocks)
    while needs.device.type == "cuda" and not _bears_step(needs, executor):
        num_blocks = _in_blocks(needs, int(num_blocks * _SHRINK) * needs.block_bytes)
        executor = _replaced(needs, allocate, num_blocks)
    _tell(needs, _told_step(needs, found, step_bytes, free) + _told_graphs(beside), num_blocks, _why(room))
    return num_blocks


def _run_trial(needs: PoolNeeds, allocate: Allocate) -> tuple[LocalExecutor, tuple[LargestStep, int]]:
    """Run the largest step in a trial pool, which is made smaller until step and pool fit. With tensor parallelism, a
    rank whose step fails raises an error, because all ranks would have to shrink the pool together."""
    num_blocks = agree_on_least(min(_trial_blocks(needs), _most_blocks(needs)), needs.device)
    least = min(needs.blocks_for(needs.step_tokens) + needs.step_seqs, num_blocks)
    executor = allocate(num_blocks)
    while True:
        try:
            return executor, _try_step(needs, executor)
        except OutOfBlocks:
            if needs.device.type != "cuda" or num_ranks() > 1 or num_blocks == least:
                raise
        num_blocks = max(int(num_blocks * _TRIAL_SHRINK), least)
        executor = _replaced(needs, allocate, num_blocks)


def _replaced(needs: PoolNeeds, allocate: Allocate, num_blocks: int) -> LocalExecutor:
    """Return an executor over a new pool of this size. The memory of the old pool is first returned to the driver."""
    allocate(1)
    release_cached(needs.device)
    return allocate(num_blocks)


def recall_step(needs: PoolNeeds) -> tuple[LargestStep, int] | None:
    """Return the largest step and its bytes, as stored by an earlier run. Return None if no earlier run stored the
    step, or if the device is not a CPU."""
    place = _step_place(needs)
    text = None if place is None else place[0].read_text(place[1])
    try:
        return None if text is None else msgspec.json.decode(text, type=tuple[LargestStep, int])
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


def remember_step(needs: PoolNeeds, found: tuple[LargestStep, int]) -> None:
    """Store the largest step and its bytes on disk, for `recall_step`."""
    place = _step_place(needs)
    if place is not None:
        place[0].write(place[1], msgspec.json.encode(found), [])


def _step_place(needs: PoolNeeds) -> tuple[FileCache, Path] | None:
    if needs.key is None or needs.device.type != "cpu" or needs.weight_bytes < LEAST_BYTES:
        return None
    sizes = (needs.block_size, needs.block_bytes, needs.max_model_len, needs.step_tokens, needs.step_seqs)
    key = msgspec.json.encode([needs.key, *sizes, torch.get_num_threads(), num_ranks()])
    files = FileCache("steps")
    return files, files.path("step", key)


def _told_step(needs: PoolNeeds, found: LargestStep, step_bytes: int, free: int) -> str:
    """Return a log text about the memory of the largest step."""
    return (
        f"the largest step ({found.num_tokens} prompt tokens, {found.num_seqs} sequences) takes "
        f"{show_bytes(step_bytes)}; "
        f"{show_bytes(free)} are free{_set_aside(needs)}, and "
    )


def _told_graphs(num_bytes: int) -> str:
    return f"CUDA graphs take {show_bytes(num_bytes)}, and " if num_bytes else ""


def _tell(needs: PoolNeeds, before: str, num_blocks: int, why: str) -> None:
    num_tokens, num_bytes = num_blocks * needs.block_size, num_blocks * needs.block_bytes
    _log.debug("%sthe KV cache holds %d tokens in %s: %s", before, num_tokens, show_bytes(num_bytes), why)


def _why(room: KVBudget) -> str:
    return f"{room.reason}; set kv_memory (--kv-memory) to change that"


def _trial_blocks(needs: PoolNeeds) -> int:
    prompts = needs.blocks_for(_trial_context(needs)) + needs.blocks_for(needs.step_tokens)
    return prompts + needs.step_seqs


def _trial_context(needs: PoolNeeds) -> int:
    if needs.device.type == "cuda":
        return needs.max_model_len
    return min(needs.max_model_len, _CPU_CONTEXT * needs.step_tokens)


def _room(needs: PoolNeeds, free: int) -> KVBudget:
    """Return this process's KV budget if the device has `free` bytes."""
    return choose_room(
        max(free - needs.reserved, 0),
        needs.device.type,
        context_bytes=needs.blocks_for(needs.max_model_len) * needs.block_bytes,
        weight_bytes=needs.weight_bytes,
        max_seqs=needs.step_seqs,
        num_sharers=needs.num_sharers,
        most=needs.config.max_kv_memory,
    )


def _most_blocks(needs: PoolNeeds) -> int:
    """Return the maximum number of blocks of the trial pool."""
    free = max(free_memory(needs.device) - needs.reserved, 0)
    most = int(free * SHARE.get(needs.device.type, SHARE["cpu"])) // needs.num_sharers
    num_blocks = _in_blocks(needs, min(most, needs.config.max_kv_memory or most))
    return max(int(num_blocks * _TRIAL_SHARE), 1) if needs.device.type == "cuda" else num_blocks


def _in_blocks(needs: PoolNeeds, num_bytes: int) -> int:
    """Return how many blocks fit into `num_bytes`. Raise an error if a request of the maximum length does not fit into
    `num_blocks` blocks."""
    return _checked(needs, num_bytes // needs.block_bytes, num_bytes)


def _try_step(needs: PoolNeeds, executor: LocalExecutor) -> tuple[LargestStep, int]:
    """Run the largest step; return its description, and its peak memory in bytes in addition to weights and pool."""
    info = executor.info
    beside = needs.step_seqs * needs.block_size  # a block for each of the other sequences
    room = info.num_blocks * needs.block_size - beside
    context = max(min(_trial_context(needs), room) - needs.step_tokens, 0)
    try:
        with executor.trying(needs.blocks_for(context)):
            return run_with_peak(
                needs.device, lambda: run_largest_step(executor, needs.step_tokens, needs.step_seqs, context)
            )
    except BridleError as error:
        if not _is_out_of_memory(error):
            raise
        raise OutOfBlocks(
            f"{needs.device} has no memory for the largest step, {needs.step_tokens} prompt tokens with "
            f"{needs.step_seqs} sequences: lower max_batch_prefill_tokens or max_num_seqs"
        ) from error


def _bears_step(needs: PoolNeeds, executor: LocalExecutor) -> bool:
    """Return whether there is enough memory for the largest step next to the allocated pool. With tensor parallelism, a
    rank whose step fails raises an error, because all ranks would have to shrink the pool together."""
    try:
        _try_step(needs, executor)
    except OutOfBlocks:
        if num_ranks() > 1:
            raise
        return False
    return True


def _is_out_of_memory(error: BridleError) -> bool:
    cause = error.__cause__
    return isinstance(cause, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(cause)
