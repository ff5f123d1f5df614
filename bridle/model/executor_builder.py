"""Builds an executor from loaded weights: chooses its kernels, determines the size of the KV pool, and allocates the
pool."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from bridle.control_vectors import ControlVectors
from bridle.engine.interfaces import ExecutorInfo, Sampler
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.load_progress import Report, silent
from bridle.lora.adapter_kernel import create_adapter_kernel
from bridle.model import attention, kv_profiling, tensor_parallel
from bridle.model.adapters import ModelAdapters
from bridle.model.block_copies import tried_copier
from bridle.model.device_defaults import choose_kv_dtype
from bridle.model.executor import LocalExecutor
from bridle.model.graph_loading import graph_loader
from bridle.model.hybrid_model import try_hybrid_model
from bridle.model.kernels.bidirectional import BidirectionalKernel
from bridle.model.kernels.self_test import tried_kernel
from bridle.model.kv_blocks import kv_identity
from bridle.model.kv_cache import KVCache, token_bytes
from bridle.model.language_model import LanguageModel
from bridle.model.layer_taps import decoder_layers
from bridle.model.loaded_weights import LoadedWeights
from bridle.model.lora_layers import Sites
from bridle.model.media_device import LocalMedia
from bridle.model.media_encoder import MediaEncoder
from bridle.model.model_cache import key_of
from bridle.model.own_attention import has_biases
from bridle.model.runner import ModelRunner
from bridle.model.state_pool import StatePool
from bridle.model.support_checks import COMPRESSED_FAMILIES

#: Tokens per step for each kind of device: enough to fill the matrix units, few enough to keep decodes quick.
STEP_TOKENS = {"cpu": 256, "cuda": 4096}
#: Maximum tokens per step of models with recurrent layers. A recurrent state processes tokens one by one, so a GPU
#: gains little from more.
RECURRENT_STEP_TOKENS = 256
STEP_SEQS = 256
#: Maximum bytes for the features of images.
MEDIA_MEMORY = {"cpu": 256 << 20, "cuda": 1 << 30}


def build_executor(
    loaded: LoadedWeights, sampler: Sampler | None, *, token_bytes_beside: int = 0, report: Report = silent
) -> LocalExecutor:
    """Build an executor with a KV pool that fits into memory. For each token in this KV pool, `token_bytes_beside`
    bytes stay free for the KV pool of a draft model. Raises `OutOfBlocks` or `InvalidRequest`."""
    return _ExecutorBuilder(loaded, token_bytes_beside).build(sampler, report)


class _ExecutorBuilder:
    """The parts from which an executor is built. `_allocate` replaces only the runner's KV pool."""

    def __init__(self, loaded: LoadedWeights, token_bytes_beside: int) -> None:
        config, geometry, dtype, device = loaded.config, loaded.geometry, loaded.dtype, loaded.device
        self._loaded = loaded
        self._block_size = kv_profiling.default_block_size(config)
        self._kv_dtype = choose_kv_dtype(config, dtype, device)
        _check_kv_dtype(self._kv_dtype, loaded)
        self._runner = self._make_runner()
        self._states = kv_profiling.StateNeeds.of(geometry)
        block_bytes = (token_bytes(geometry, self._kv_dtype) + token_bytes_beside) * self._block_size
        self._info = _info_of(loaded, self._block_size, block_bytes, self._runner.embedding_size)
        self._adapters = ModelAdapters(
            Sites(loaded.model), dtype, device, create_adapter_kernel(config.adapter_kernel, device, dtype)
        )
        self._vectors = make_control_vectors(loaded.model, self._runner, dtype, device)
        self._copier = tried_copier(device)
        self._graphs = graph_loader(config, self._runner, geometry, self._adapters)
        self._media = _media_device(loaded.model, dtype, device)
        self._runner.features = None if self._media is None else self._media.features
        self._sampler = _standard_sampler(device, dtype, self._info.vocab_size)

    def build(self, sampler: Sampler | None, report: Report) -> LocalExecutor:
        """Determine the size of the KV pool, allocate it, and capture CUDA graphs if the device supports them."""
        graphs = self._graphs
        num_blocks = kv_profiling.fit_pool(self._needs(), self._allocate, None if graphs is None else graphs.measure)
        executor = self._over(num_blocks, sampler or self._sampler)
        self._runner.graphs = None if graphs is None else graphs.load(executor.info, report)
        return executor

    def _make_runner(self) -> ModelRunner:
        """Return a runner whose cache has one block, with the fastest attention kernels that passed their self-test."""
        loaded, geometry = self._loaded, self._loaded.geometry
        kernel = tried_kernel(loaded.config.kernel, loaded.device, loaded.dtype, geometry, self._block_size)
        if isinstance(loaded.model, LanguageModel) and loaded.model.num_mutual_rows:
            kernel = BidirectionalKernel(kernel, is_local=loaded.model.sees_locally)
        with tensor_parallel.unsummed():  # the constructor runs its layers
            cache = KVCache(geometry, 1, self._block_size, self._kv_dtype, loaded.device)
            runner = ModelRunner(loaded.model, attention.PagedAttention(cache, kernel))
        is_plain = loaded.dtype is torch.float32 and tensor_parallel.num_ranks() == 1
        if geometry.states and kernel.name == "native" and is_plain:
            runner.use_hybrid(try_hybrid_model(loaded.model, geometry))
        runner.keep_angles(loaded.max_model_len)
        return runner

    def _needs(self) -> kv_profiling.PoolNeeds:
        loaded, info = self._loaded, self._info
        return kv_profiling.PoolNeeds(
            config=loaded.config,
            device=loaded.device,
            block_size=self._block_size,
            block_bytes=info.block_bytes + self._states.bytes_beside(info.block_bytes),
            max_model_len=loaded.max_model_len,
            step_tokens=info.max_num_batched_tokens,
            step_seqs=info.max_num_seqs,
            media_bytes=0 if self._media is None else self._media.reserved_bytes,
            weight_bytes=self._runner.num_bytes,
            key=loaded.key or key_of(loaded.config, loaded.checkpoint.folder),
        )

    def _allocate(self, num_blocks: int) -> LocalExecutor:
        geometry, device, parts = self._loaded.geometry, self._loaded.device, self._runner.attention
        size = num_blocks + (self._graphs is not None)  # graphs have a dummy block
        parts.cache = KVCache(geometry, size, self._block_size, self._kv_dtype, device, self._copier)
        if self._states.num_bytes:
            parts.states = StatePool(geometry.states, self._num_states(num_blocks), device)
        return self._over(num_blocks, self._sampler)

    def _over(self, num_blocks: int, sampler: Sampler) -> LocalExecutor:
        """Return an executor over the KV pool that is currently allocated."""
        loaded, num_ids = self._loaded, self._loaded.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        room = num_blocks * self._block_size if loaded.config.max_model_len is None else loaded.max_model_len
        info = replace(self._info, num_blocks=num_blocks, max_model_len=min(loaded.max_model_len, room))
        if self._states.num_bytes:
            info = replace(info, num_states=self._num_states(num_blocks), state_bytes=self._states.num_bytes)
        identity = partial(kv_identity, loaded, self._runner.attention.cache)
        return LocalExecutor(
            info, self._runner, sampler, num_ids, loaded.device, self._adapters, self._media, identity, self._vectors
        )

    def _num_states(self, num_blocks: int) -> int:
        return self._states.num_slots(num_blocks, self._info.block_bytes)


def _check_kv_dtype(kv_dtype: torch.dtype, loaded: LoadedWeights) -> None:
    """Raise `InvalidRequest` if an 8-bit KV cache is requested and the model's keys need more precision."""
    held = _demands_of_keys(loaded) if kv_dtype is torch.int8 else None
    if held is not None:
        raise InvalidRequest(
            f"kv_cache_dtype is 'int8', but this model's keys {held}, which int8 cannot hold; use 'bfloat16'",
            "kv_cache_dtype",
        )


def _demands_of_keys(loaded: LoadedWeights) -> str | None:
    """Return the reason why the model's keys need more than 8 bits; None if 8 bits are enough."""
    if has_biases(loaded.model):
        return "hold biases of positions"
    if not loaded.geometry.indexes:
        return None
    config: Any = loaded.model.config
    return "are compressed in windows" if config.model_type in COMPRESSED_FAMILIES else "are selected by an index"


def _num_mutual_rows(model: nn.Module) -> int:
    return model.num_mutual_rows if isinstance(model, LanguageModel) else 0


def make_control_vectors(
    model: nn.Module, runner: ModelRunner, dtype: torch.dtype, device: torch.device
) -> ControlVectors | None:
    """Return the store of the model's control vectors; None if the model does not support control vectors."""
    if getattr(model.config, "hc_mult", 1) > 1:  # of which layers have several streams
        return None
    try:
        layers = decoder_layers(model) if runner.lowered is None else runner.lowered.layers
    except UnsupportedFeature:
        return None
    return ControlVectors(len(layers), model.config.hidden_size, dtype, device)  # type: ignore[union-attr,arg-type]


def _info_of(loaded: LoadedWeights, block_size: int, block_bytes: int, embedding_size: int) -> ExecutorInfo:
    """Return the model's properties that the engine needs, for a KV pool of one block."""
    step_tokens = STEP_TOKENS[loaded.device.type]
    if loaded.geometry.states:
        step_tokens = min(step_tokens, RECURRENT_STEP_TOKENS)
    return ExecutorInfo(
        model=loaded.config.model,
        vocab_size=loaded.geometry.vocab_size,
        max_model_len=loaded.max_model_len,
        num_blocks=1,
        block_size=block_size,
        eos_token_ids=loaded.checkpoint.eos_token_ids,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        max_num_batched_tokens=loaded.config.step_tokens or step_tokens + _num_mutual_rows(loaded.model),
        max_num_seqs=loaded.config.step_seqs or STEP_SEQS,
        embedding_size=embedding_size,
        block_bytes=block_bytes,
    )


def _media_device(model: nn.Module, dtype: torch.dtype, device: torch.device) -> LocalMedia | None:
    """Return the object that encodes images and sounds and stores their features; None for text-only models."""
    if not isinstance(model, LanguageModel):
        return None
    encoder = MediaEncoder(model.inner, model.config.hidden_size, dtype, device)
    return LocalMedia(encoder, MEDIA_MEMORY[device.type])


def _standard_sampler(device: torch.device, dtype: torch.dtype, vocab: int) -> Sampler:
    if device.type == "cuda":
        from bridle.model.sampler_self_test import tried_sampler

        return tried_sampler(device, dtype, vocab)
    from bridle.model.sampler import StandardSampler

    return StandardSampler()
