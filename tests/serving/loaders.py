"""A loader of fake models. The test decides when a load finishes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from bridle.config import ModelConfig
from bridle.errors import (
    UnsupportedModel,
)
from bridle.serving import (
    LoadedModel,
    ModelRegistry,
)
from bridle.serving.models.catalog import ModelCatalog
from bridle.serving.models.model_loader import ModelManager
from bridle.serving.models.model_memory import Needs
from bridle.serving.models.model_slot import Slot
from bridle.testing.clock import FakeClock
from tests.serving.fakes import fake_model
from tests.waiting import PATIENCE

MIB = 1 << 20


class FakeLoader:
    """A loader of fake models. `sizes` are the models' weights, and `room` is the memory for the adapters of each model
    that supports them, both in MiB. With `is_held` a load waits for `go`. With `is_endless` outputs never end by
    themselves."""

    def __init__(
        self, sizes: dict[str, int], is_held: bool = False, is_endless: bool = False, room: int | None = None
    ) -> None:
        self.sizes = sizes
        self.room = room
        self.is_endless = is_endless
        self.loads: list[str] = []
        self.measured: list[str] = []
        self.on_measure: Callable[[], object] = lambda: None  # in the thread that measures
        self.configs: dict[str, ModelConfig] = {}
        self.models: dict[str, LoadedModel] = {}
        self.began = threading.Event()
        self.go = threading.Event()
        self.error: Exception | None = None
        if not is_held:
            self.go.set()

    def measure(self, config: ModelConfig, name: str) -> Needs:
        self.measured.append(name)
        self.on_measure()
        if config.model not in self.sizes:
            raise UnsupportedModel(f"there is no {config.model!r}")
        return Needs(self.sizes[config.model] * MIB, config.reserved_memory or 0)

    def make_room(self, config: ModelConfig) -> ModelConfig:
        return config if self.room is None else replace(config, reserved_memory=self.room * MIB)

    def load(self, config: ModelConfig, name: str, progress: Callable[[str, float], None]) -> LoadedModel:
        self.loads.append(config.model)
        self.began.set()
        progress("reading weights", 0.5)
        assert self.go.wait(PATIENCE)
        progress("ready", 1.0)
        if self.error is not None:
            raise self.error
        model = fake_model(name=name, is_endless=self.is_endless)
        kv = config.kv_memory or config.max_kv_memory or 0
        model.num_bytes = self.sizes[config.model] * MIB + kv + (config.reserved_memory or 0)
        self.configs[name], self.models[name] = config, model
        return model


def registry_of(
    loader: FakeLoader,
    max_mib: int | None = None,
    clock: FakeClock | None = None,
    named: tuple[str, ...] = (),
    kv_mib: int | None = None,
) -> ModelRegistry:
    """Return a registry whose catalog has the models of the loader."""
    base = ModelConfig(kv_memory=None if kv_mib is None else kv_mib * MIB)
    keeper = ModelManager(loader, None if max_mib is None else max_mib * MIB, clock or FakeClock())
    registry = ModelRegistry(catalog=ModelCatalog(base, hub_ids=loader.sizes), keeper=keeper)
    slots = [Slot(name, ModelConfig(name), is_pinned=True) for name in named]
    for slot in slots:
        registry.add_slot(slot)
    keeper.fill(slots, keeps_share=True)
    return registry
