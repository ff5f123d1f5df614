"""Adapters on a cluster: named when the application is deployed, known to every front, read by engines when wanted.

An engine that has not been sent an adapter yet reads it for the first request that wants it; the router sees to it that
few do. Names cannot be added later: nobody could tell all engines, those to come included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future

from bridle.errors import UnsupportedFeature
from bridle.lora import AdapterFiles, AdapterStatus
from bridle.service.adapters import AdapterRegistry


class FarAdapters:
    """A front's `AdapterHome`: the weights are elsewhere, and requests wait for them there."""

    def __init__(self) -> None:
        self._is_sealed = False

    def seal(self) -> None:
        """All names are there."""
        self._is_sealed = True

    def check(self, files: AdapterFiles) -> None:
        if self._is_sealed:
            raise UnsupportedFeature("adapters of a cluster are named when it is deployed, in `adapters`", "adapter")

    def add(self, key: str, files: AdapterFiles) -> None:
        """The engines were told the same."""

    def remove(self, key: str) -> None:
        """The engines keep it; no request of this front asks for it any more."""

    def status(self, key: str) -> AdapterStatus:
        return AdapterStatus("host")

    def fetch(self, key: str) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done


def register(registry: AdapterRegistry, adapters: Mapping[str, str]) -> None:
    """Make adapters known by name; each is a folder or a hub id. Looks at their files."""
    for name, source in adapters.items():
        registry.add(name, source)


def far_registry(adapters: Mapping[str, str], base_names: Iterable[str]) -> AdapterRegistry:
    """What a front knows of adapters."""
    home = FarAdapters()
    registry = AdapterRegistry(home, base_names)
    register(registry, adapters)
    home.seal()
    return registry
