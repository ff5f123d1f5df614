"""Valid and invalid adapter files that tests write, and fakes of the device and of the adapter pool's surroundings."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bridle.lora import AdapterFiles, AdapterLimits, AdapterPool, LayerShape
from bridle.testing.clock import FakeClock
from tests.waiting import PATIENCE

LAYERS = {
    f"model.layers.{number}.{name}": LayerShape(*sides)
    for number in range(3)
    for name, sides in {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (32, 16),
        "self_attn.v_proj": (32, 16),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (32, 64),
        "mlp.up_proj": (32, 64),
        "mlp.down_proj": (64, 32),
    }.items()
}
#: Every kind of layer that a dense model of the Llama make has.
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    layers: Mapping[str, LayerShape] = LAYERS,
    *,
    targets: tuple[str, ...] = ("q_proj", "v_proj"),
    rank: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tensors: Mapping[str, Tensor | None] | None = None,
    ranks: Mapping[str, int] | None = None,
    **fields: Any,
) -> Path:
    """Write an adapter for the layers whose names end in one of `targets`, large enough to change outputs.

    `tensors` adds or replaces tensors (None leaves one out), `ranks` sets the rank of single layers, and `fields` are
    fields of the adapter's configuration."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in layers.items():
        if not name.endswith(targets):
            continue
        own = (ranks or {}).get(name, rank)
        first = torch.randn(own, shape.in_features, generator=generator) / math.sqrt(shape.in_features)
        second = torch.randn(shape.out_features, own, generator=generator) * 0.5
        weights[f"base_model.model.{name}.lora_A.weight"] = first.to(dtype)
        weights[f"base_model.model.{name}.lora_B.weight"] = second.to(dtype)
    weights.update({name: tensor for name, tensor in (tensors or {}).items() if tensor is not None})
    for name in [name for name, tensor in (tensors or {}).items() if tensor is None]:
        del weights[name]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets), **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


SECONDS = PATIENCE


class FakeDevice:
    """A fake device that records its calls and can be delayed, made to fail, or lost."""

    def __init__(self) -> None:
        self.layers: Mapping[str, LayerShape] = LAYERS
        self.epoch = 0
        self.host: set[str] = set()
        self.device: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.fault: Exception | None = None
        self.most_on_device = self.most_on_host = self.num_reads = 0

    def read(self, key: str, files: AdapterFiles) -> None:
        self.num_reads += 1
        assert self.gate.wait(SECONDS)
        if self.fault is not None:
            raise self.fault
        self.host.add(key)
        self.most_on_host = max(self.most_on_host, len(self.host))

    def place(self, key: str) -> None:
        assert key in self.host
        if self.fault is not None:
            raise self.fault
        self.device.add(key)
        self.most_on_device = max(self.most_on_device, len(self.device))

    def displace(self, key: str) -> None:
        self.device.discard(key)

    def drop(self, key: str) -> None:
        self.host.discard(key)

    def clear(self) -> None:
        self.host.clear()
        self.device.clear()

    def lose(self) -> None:
        self.clear()
        self.epoch += 1


def size_of(files: AdapterFiles) -> int:
    """Return the bytes that an adapter takes on the device."""
    return AdapterLimits(LAYERS, 4, 0, 0).device_bytes(files)


class Bench:
    """An adapter pool over a fake device, with memory for given numbers of equal adapters on the device and on the
    host."""

    def __init__(self, files: AdapterFiles, num_device: int, num_host: int) -> None:
        self.files = files
        self.device = FakeDevice()
        self.clock = FakeClock()
        self.pool = AdapterPool(
            self.device,
            item_size=4,
            device_memory=num_device * size_of(files),
            host_memory=num_host * files.num_bytes,
            clock=self.clock,
        )
        self.changed = threading.Event()
        self.pool.on_change = self.changed.set

    def add(self, *keys: str, use: bool = True) -> None:
        for key in keys:
            self.pool.add(key, self.files)
            if use:
                self.pool.open(key)

    def step(self, *keys: str) -> set[str]:
        """Begin one step that needs the adapters `keys`; return the adapters that the step may use."""
        available = self.pool.begin_step(keys)
        assert available <= self.device.device, "the step would not find what it was promised"
        return available

    def step_until(self, wanted: set[str], *keys: str) -> int:
        """Run steps until one may use all `wanted` adapters; return the number of steps."""
        for number in range(10_000):
            self.changed.clear()
            if wanted <= self.step(*keys):
                return number
            self.changed.wait(0.01)
        raise AssertionError(f"{wanted} never came together; there is {self.device.device}")
