"""Tests of the memory for adapters: the amount is fixed before anything is loaded, and adapters never take more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bridle import LLM
from bridle.config import ADAPTER_HOST_MEMORY, ADAPTER_MEMORY, EngineConfig, ModelConfig
from bridle.launch.replicas import ReplicaLoader
from bridle.lora.torch_ops import MAX_STACK_BYTES, MAX_STACKS
from bridle.model import memory_estimate
from bridle.model.memory_estimate import settle_adapters
from bridle.serving import ControlSettings
from bridle.serving.models.served_models import EngineLoader
from tests.fakes import tiny_checkpoints

GIB, MIB = 1 << 30, 1 << 20
CPU, GPU = ModelConfig(device="cpu"), ModelConfig(device="cuda")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return the free bytes of a fake machine with a GPU, by kind of device; tests may change them."""
    sizes = {"cpu": 800 * GIB, "cuda": 80 * GIB}
    monkeypatch.setattr(memory_estimate, "free_memory", lambda device: sizes[device.type])
    monkeypatch.setattr(memory_estimate, "choose_device", torch.device)
    return sizes


def test_what_is_said_counts(free: dict[str, int]) -> None:
    said = EngineConfig(adapter_memory=5 * GIB, adapter_host_memory=7 * GIB)
    config, engine = settle_adapters(GPU, said)
    assert engine == said and config == replace(GPU, reserved_memory=5 * GIB)
    in_torch, _ = settle_adapters(replace(GPU, adapter_kernel="torch"), said)
    assert in_torch.reserved_memory == 5 * GIB + MAX_STACKS * MAX_STACK_BYTES
    config, _ = settle_adapters(CPU, said)  # one memory for both tiers
    assert config.reserved_memory == 5 * GIB + MAX_STACKS * MAX_STACK_BYTES + 7 * GIB
    config, _ = settle_adapters(CPU, EngineConfig(adapter_memory=MIB, adapter_host_memory=MIB))
    assert config.reserved_memory == (1 + MAX_STACKS + 1) * MIB  # no stack is larger than what lies in it


def test_defaults_leave_most_of_a_small_machine_alone(free: dict[str, int]) -> None:
    config, engine = settle_adapters(GPU, EngineConfig())
    assert (engine.adapter_memory, engine.adapter_host_memory) == (ADAPTER_MEMORY, ADAPTER_HOST_MEMORY)
    assert config.reserved_memory == ADAPTER_MEMORY
    free |= {"cpu": GIB, "cuda": 2 * GIB}
    config, engine = settle_adapters(GPU, EngineConfig())
    assert (engine.adapter_memory, engine.adapter_host_memory) == (256 * MIB, 128 * MIB)
    config, engine = settle_adapters(CPU, EngineConfig())
    assert config.reserved_memory == 4 * 128 * MIB == free["cpu"] // 2
    _, engine = settle_adapters(CPU, EngineConfig(), num_copies=4)
    assert engine.adapter_memory == 32 * MIB


def test_what_was_settled_stays(free: dict[str, int]) -> None:
    """A model that is loaded later gets the memory that was computed for it, whatever memory is free by then."""
    for loader in (EngineLoader(), ReplicaLoader(2, 0, EngineConfig(), ControlSettings("off"))):
        free["cpu"] = 4 * GIB
        first = loader.make_room(CPU)
        free["cpu"] = GIB
        assert loader.make_room(CPU) == first
        checkpoint = replace(first, model=str(tiny_checkpoints.cached_checkpoint("llama")))
        needs = loader.measure(checkpoint, "m")
        num_copies = 2 if isinstance(loader, ReplicaLoader) else 1
        assert first.reserved_memory is not None
        assert needs.adapters == num_copies * first.reserved_memory and needs.weights > 0


@pytest.mark.parametrize("adapters", [None, {}])
def test_a_model_that_may_have_adapters_leaves_them_their_memory(adapters: dict[str, str] | None) -> None:
    path, settings = str(tiny_checkpoints.cached_checkpoint("llama")), {"num_blocks": 8, "block_size": 16}
    with LLM(path, **settings) as llm:
        alone = llm.model.num_bytes
    settings |= {"adapter_memory": 3 * MIB, "adapter_host_memory": 5 * MIB}
    with LLM(path, adapters=adapters, **settings) as llm:
        assert llm.model.num_bytes == alone + (3 + MAX_STACKS * 3 + 5) * MIB
        pool = llm.model.adapter_pool
        assert pool is not None
        assert (pool.limits.device_memory, pool.limits.host_memory) == (3 * MIB, 5 * MIB)
