"""Creates the parts of an engine from its settings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from bridle.config import PARKED_SHARE, RETAINED_SHARE, EngineConfig
from bridle.engine.interfaces import Embedder, Executor, ExecutorInfo
from bridle.engine.kv.block_manager import BlockManager
from bridle.engine.multimodal.encoder_scheduler import EncoderScheduler
from bridle.engine.sampling.padded_vocab import PaddedVocab
from bridle.engine.scheduling.admission_order import PrefillGate
from bridle.engine.scheduling.batching import Batching
from bridle.engine.scheduling.lora_scheduler import LoRAScheduler
from bridle.engine.scheduling.scheduler import Scheduler
from bridle.engine.spec_decode.draft_model import DraftModelProposer
from bridle.engine.spec_decode.speculation import Speculation


def max_parked_blocks(info: ExecutorInfo, config: EngineConfig) -> int:
    """Return the maximum number of blocks with retained KV."""
    if config.park_memory is None or (config.park_memory and not info.block_bytes):
        return int(info.num_blocks * PARKED_SHARE)
    return min(config.park_memory // max(info.block_bytes, 1), info.num_blocks)


def max_retained_blocks(info: ExecutorInfo, config: EngineConfig) -> int:
    """Return the maximum number of blocks that one user may retain."""
    if config.max_retained_tokens is None:
        return int(max_parked_blocks(info, config) * RETAINED_SHARE)
    return config.max_retained_tokens // max(info.block_size, 1)


def engine_info(executor: Executor, batching: Batching, unnamed: PaddedVocab) -> ExecutorInfo:
    """Return the executor's info, limited by the configuration of the engine."""
    info = replace(batching.limit(executor.info), unnamed=unnamed)
    return info if isinstance(executor, Embedder) else replace(info, embedding_size=0)


def make_speculation(
    info: ExecutorInfo, config: EngineConfig, draft: Executor | None, clock: Callable[[], float]
) -> Speculation:
    """Create the part of the engine that does speculative decoding, with the draft model if there is one."""
    proposer = None if draft is None else DraftModelProposer(draft, info.vocab_size, clock, unnamed=info.unnamed)
    timer = time.thread_time if clock is time.monotonic else clock  # the CPU time of other threads is no cost of drafts
    return Speculation(config.speculate, proposer, info.vocab_size, timer)


def make_scheduler(
    info: ExecutorInfo,
    config: EngineConfig,
    batching: Batching,
    clock: Callable[[], float],
    rotation: LoRAScheduler,
    media: EncoderScheduler,
    speculation: Speculation,
) -> Scheduler:
    """Return the scheduler, with the KV blocks of the backend."""
    caching = config.enable_prefix_caching and info.kv == "paged"
    blocks = BlockManager(
        info.num_blocks,
        info.block_size,
        enable_prefix_caching=caching,
        model=info.model,
        max_parked=max_parked_blocks(info, config),
        park_seconds=config.park_seconds,
        max_retained=config.max_retained,
        max_asked_blocks=max_retained_blocks(info, config),
        num_states=info.num_states,
    )
    return Scheduler(
        blocks,
        batching.max_step_tokens,
        batching.max_batch_size,
        kv=info.kv,
        clock=clock,
        max_batch_prefill_tokens=batching.max_batch_prefill_tokens,
        chunked_prefill=batching.chunked_prefill,
        gate=PrefillGate(batching.waiting_served_ratio, batching.max_waiting_tokens),
        priority_seconds=config.priority_seconds,
        rotation=rotation,
        speculation=speculation,
        media=media,
    )
