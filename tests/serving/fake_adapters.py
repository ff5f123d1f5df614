"""A fake store of adapters that holds no weights: it records the registry's requests, and the test decides when and how
a load ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from bridle.config import ModelConfig
from bridle.errors import AdapterRefused
from bridle.lora import AdapterFiles
from bridle.serving import AdapterRegistry, LoadedModel
from bridle.serving.lora.adapter_registry import AdapterStatus
from tests.serving.loaders import FakeLoader

#: Layers of the demo model that adapters may change, with their features.
DEMO_LAYERS = {
    f"model.layers.{layer}.self_attn.{name}": (256, num_out)
    for layer in range(6)
    for name, num_out in (("q_proj", 256), ("v_proj", 128))
}


class FakeHome:
    """A fake store that holds no weights. With `is_held` a load waits for `release`. Loads of folders in `broken`
    fail."""

    def __init__(self, is_held: bool = False) -> None:
        self.is_held = is_held
        self.broken: set[str] = set()
        self.files: dict[str, AdapterFiles] = {}
        self.waiting: dict[str, Future[None]] = {}
        self.ready: set[str] = set()
        self.removed: list[str] = []
        self.began = threading.Event()

    def check(self, files: AdapterFiles) -> None:
        if files.rank > 64:
            raise AdapterRefused(f"the rank is {files.rank}; this model takes at most 64", "source")

    def add(self, key: str, files: AdapterFiles) -> None:
        self.files[key] = files

    def remove(self, key: str) -> None:
        del self.files[key]
        self.ready.discard(key)
        self.removed.append(key)

    def status(self, key: str) -> AdapterStatus:
        return AdapterStatus("host" if key in self.ready else "loading" if key in self.waiting else "known")

    def fetch(self, key: str) -> Future[None]:
        future = self.waiting.setdefault(key, Future())
        self.began.set()
        if not self.is_held:
            self.release(key)
        return future

    def release(self, key: str) -> None:
        """Let a load finish."""
        future = self.waiting.pop(key)
        folder = self.files[key].folder
        if folder.name in self.broken:
            future.set_exception(AdapterRefused(f"{folder}/adapter_model.safetensors changed", "source"))
            return
        self.ready.add(key)
        future.set_result(None)


def with_adapters(model: LoadedModel, home: FakeHome | None = None) -> FakeHome:
    """Add an adapter store to a model, and return the store."""
    home = home or FakeHome()
    model.adapters = AdapterRegistry(home, (model.name,))
    return home


def write_adapter(
    folder: Path, layers: Mapping[str, tuple[int, int]] | None = None, rank: int = 2, scale: float = 0.0, seed: int = 0
) -> Path:
    """Write a PEFT adapter for linear layers of (in, out) features, with random weights of size `scale`."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tensors = {}
    for name, (num_in, num_out) in (layers or {"model.layers.0.self_attn.q_proj": (8, 8)}).items():
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = scale * random.standard_normal((rank, num_in), dtype=np.float32)
        tensors[f"{prefix}.lora_B.weight"] = scale * random.standard_normal((num_out, rank), dtype=np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in layers or ("q_proj",)})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_demo_adapter(folder: Path, seed: int = 0) -> Path:
    """Write an adapter that changes the output of the demo model."""
    return write_adapter(folder, DEMO_LAYERS, rank=4, scale=0.5, seed=seed)


class AdapterFakes(FakeLoader):
    """A loader of fake models with adapters."""

    def load(self, config: ModelConfig, name: str, progress: Callable[[str, float], None]) -> LoadedModel:
        model = super().load(config, name, progress)
        with_adapters(model)
        return model
