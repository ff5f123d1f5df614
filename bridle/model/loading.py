"""Loads a model, with its draft model if there is one, or a pooling model. A model and its draft model have KV pools
for the same number of tokens, and share one memory budget. The weights of both models are loaded first. The KV pool of
the model is sized as if each token took the memory of a token in both pools. The memory of the largest step is measured
for the model alone, because the two models never compute at the same time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bridle.config import ModelConfig
from bridle.engine.interfaces import Sampler
from bridle.errors import InvalidRequest
from bridle.load_progress import Report, part_of
from bridle.malloc import keep_large_buffers
from bridle.model import kv_profiling, tensor_parallel
from bridle.model.device_defaults import choose_kv_dtype
from bridle.model.executor import LocalExecutor
from bridle.model.executor_builder import build_executor
from bridle.model.hub_lookup import folder_of
from bridle.model.kv_cache import token_bytes
from bridle.model.loaded_weights import LoadedWeights
from bridle.model.loader import load_weights
from bridle.model.model_cache import keep
from bridle.model.pooling.settings import read_pooling
from bridle.threads import run_in_thread

if TYPE_CHECKING:
    from bridle.model.pooling.executor import PooledExecutor


def load_executor(
    config: ModelConfig, progress: Report | None = None, sampler: Sampler | None = None
) -> LocalExecutor | PooledExecutor:
    """Load a model and make it ready to compute.

    `progress(what, share)` is called with the name of the current stage and the progress of loading from 0 to 1.
    Loading runs in a separate thread, which ends when loading ends. Raises `UnsupportedModel`, `InvalidRequest` or
    `OutOfBlocks`, whose messages say what to change.
    """
    report = progress or (lambda what, share: None)
    return run_in_thread(lambda: _load(config, report, sampler), "bridle-load")


def _load(config: ModelConfig, report: Report, sampler: Sampler | None) -> LocalExecutor | PooledExecutor:
    report("finding the model", 0.0)
    folder = folder_of(config, lambda share: report("downloading", share))
    pooling = read_pooling(folder)
    if pooling is not None:
        from bridle.model.pooling.loading import load_pooled

        return load_pooled(config, folder, pooling, report)
    load = _load_single if config.draft_model is None else _load_pair
    executor = load(config, report, sampler)
    if executor.info.device == "cpu":
        keep_large_buffers()  # after the weights and the KV cache, whose memory is not freed
    return executor


def _load_single(config: ModelConfig, report: Report, sampler: Sampler | None) -> LocalExecutor:
    loaded = load_weights(config, report)
    report("running the largest step", 0.95)
    executor = build_executor(loaded, sampler, report=_late(report))
    if loaded.key is None:
        report("caching the packed weights", 0.99)
        keep(config, loaded)
    report("ready", 1.0)
    return executor


def _load_pair(config: ModelConfig, report: Report, sampler: Sampler | None) -> LocalExecutor:
    """Return the executor of a model that has a draft model. The returned executor contains the draft model's
    executor."""
    if tensor_parallel.num_ranks() > 1:
        raise InvalidRequest("draft_model: a draft model works only with one shard; set shards to 1", "draft_model")
    draft = load_weights(config_of_draft(config), lambda what, share: report(f"draft model: {what}", 0.2 * share))
    if draft.geometry.states:
        raise InvalidRequest(
            f"draft_model {config.draft_model!r} has recurrent layers, whose states cannot be rolled back; "
            "use a model with only attention layers",
            "draft_model",
        )
    target = load_weights(config, lambda what, share: report(what, 0.2 + 0.8 * share))
    report("running the largest step", 0.95)
    executor = build_executor(target, sampler, token_bytes_beside=_token_bytes(draft), report=_late(report))
    num_tokens = executor.info.num_blocks * executor.info.block_size
    executor.draft = build_executor(_with_room(draft, num_tokens), None)
    report("ready", 1.0)
    return executor


def _late(report: Report) -> Report:
    """Return a progress callback that maps its share to the last 5 % of loading."""
    return lambda what, share: report(what, part_of(0.95, 1.0, share))


def config_of_draft(config: ModelConfig) -> ModelConfig:
    """Return the draft model's configuration: the model's configuration with the draft model's name, without settings
    that belong to one checkpoint."""
    assert config.draft_model is not None
    return replace(
        config,
        model=config.draft_model,
        draft_model=None,
        revision=None,
        tokenizer=None,
        mmproj=None,
        max_model_len=None,
        kv_memory=None,
        kv_tokens=None,
        max_kv_memory=None,
    )


def _token_bytes(loaded: LoadedWeights) -> int:
    return token_bytes(loaded.geometry, choose_kv_dtype(loaded.config, loaded.dtype, loaded.device))


def _with_room(loaded: LoadedWeights, num_tokens: int) -> LoadedWeights:
    """Return the weights of the draft model, configured for a KV pool of `num_tokens` tokens. Memory for the draft
    model's KV pool was reserved before this call."""
    block_size = kv_profiling.default_block_size(loaded.config)
    return replace(loaded, config=replace(loaded.config, num_blocks=-(-num_tokens // block_size)))
