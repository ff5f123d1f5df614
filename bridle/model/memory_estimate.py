"""Estimates the memory of a model from its files, and the free memory of its device. All sizes are in bytes. No model
is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from bridle.config import ADAPTER_HOST_MEMORY, ADAPTER_MEMORY, EngineConfig, ModelConfig
from bridle.lora.torch_ops import MAX_STACK_BYTES, MAX_STACKS
from bridle.model import support_checks
from bridle.model.checkpoint import Checkpoint, inspect_checkpoint
from bridle.model.device_defaults import choose_device, choose_dtype
from bridle.model.hub_lookup import folder_of
from bridle.model.loaded_weights import weight_bytes
from bridle.model.loading import config_of_draft
from bridle.model.memory import free_memory
from bridle.model.model_cache import find_description
from bridle.model.pooling.settings import read_pooling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: By default, adapters on the device, and adapters on the host, each get at most the free memory divided by this
#: number.
_ADAPTER_PART = 8


def weights_of(config: ModelConfig) -> int:
    """Return the bytes that the weights of a model and its draft model will take in memory. The bytes are computed from
    the headers of the files, which are downloaded if necessary. For a checkpoint that cannot be loaded, raises the same
    error as loading."""
    if config.draft_model is not None:
        return weights_of(replace(config, draft_model=None)) + weights_of(config_of_draft(config))
    folder = folder_of(config)
    kept = find_description(config, folder)
    if kept is not None:
        return kept.weight_bytes
    checkpoint = inspect_checkpoint(folder)
    if config.backend == "llamacpp":  # the models of llama.cpp may be unknown to transformers
        return checkpoint.num_bytes
    device = choose_device(config.device)
    dtype = choose_dtype(config, _settings(checkpoint), device)
    return weight_bytes(checkpoint, dtype, device)


def _settings(checkpoint: Checkpoint) -> PreTrainedConfig:
    if read_pooling(checkpoint.folder) is not None:
        return support_checks.read_config(checkpoint, pools=True)
    return support_checks.serving_config(checkpoint)


def free_on(config: ModelConfig) -> int:
    """Return the free bytes on the device that a model would be loaded to."""
    return free_memory(choose_device(config.device))


def settle_adapters(config: ModelConfig, engine: EngineConfig, num_copies: int = 1) -> tuple[ModelConfig, EngineConfig]:
    """Set the memory for adapters in both configurations and return them. `engine` gets the adapter memory of host and
    device; `config` reserves the device's memory. `num_copies` engines with these configurations share the machine."""
    device = choose_device(config.device)
    engine = replace(
        engine,
        adapter_memory=engine.adapter_memory or _part(ADAPTER_MEMORY, device, num_copies),
        adapter_host_memory=engine.adapter_host_memory or _part(ADAPTER_HOST_MEMORY, torch.device("cpu"), num_copies),
    )
    return replace(config, reserved_memory=config.reserved_memory or _reserve(config, engine, device)), engine


def _part(wanted: int, device: torch.device, num_copies: int) -> int:
    return max(min(wanted, free_memory(device) // _ADAPTER_PART // num_copies), 1)


def _reserve(config: ModelConfig, engine: EngineConfig, device: torch.device) -> int:
    """Return the maximum bytes of adapters in the memory that also holds the model and its KV cache."""
    assert engine.adapter_memory is not None
    assert engine.adapter_host_memory is not None
    reserve = engine.adapter_memory
    if device.type == "cpu" or config.adapter_kernel == "torch":  # for contiguous weights of a step's adapters
        reserve += MAX_STACKS * min(MAX_STACK_BYTES, engine.adapter_memory)
    if device.type == "cpu":
        reserve += engine.adapter_host_memory
    return reserve
