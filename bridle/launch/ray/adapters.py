"""LoRA adapters on a Ray cluster. The adapters are set when the application is deployed. Every front knows all
adapters; engines load them on demand.

An engine loads an adapter for the first request that names it. The router prefers engines that have the adapter, so few
engines load it. Adapters cannot be added later, because engines that start later would not know them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future

from bridle.errors import UnsupportedFeature
from bridle.lora import AdapterFiles, AdapterStatus
from bridle.serving.lora.adapter_registry import AdapterRegistry


class IngressLoRAStore:
    """A front's `LoRAStore`, which has no weights. Engines load the adapters, and requests wait in the engines."""

    def __init__(self) -> None:
        self._is_sealed = False

    def seal(self) -> None:
        """Refuse further adapters from now on."""
        self._is_sealed = True

    def check(self, files: AdapterFiles) -> None:
        if self._is_sealed:
            raise UnsupportedFeature(
                "adapters of a Ray cluster are set only when it is deployed, in `adapters`", "adapter"
            )

    def add(self, key: str, files: AdapterFiles) -> None:
        """Do nothing, because the engines have the same list of adapters."""

    def remove(self, key: str) -> None:
        """Do nothing. The engines keep the adapter, but no request of this front can name it any more."""

    def status(self, key: str) -> AdapterStatus:
        return AdapterStatus("host")

    def fetch(self, key: str) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done


def register(registry: AdapterRegistry, adapters: Mapping[str, str]) -> None:
    """Register adapters by name; each source is a folder or a hub id. Reads the adapters' files."""
    for name, source in adapters.items():
        registry.add(name, source)


def far_registry(adapters: Mapping[str, str], base_names: Iterable[str]) -> AdapterRegistry:
    """Return a front's registry of adapters."""
    home = IngressLoRAStore()
    registry = AdapterRegistry(home, base_names)
    register(registry, adapters)
    home.seal()
    return registry
