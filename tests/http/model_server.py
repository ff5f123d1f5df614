"""A server that can load further fake models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bridle.config import ModelConfig
from bridle.http import HttpSettings
from bridle.serving import ModelRegistry, ModelSet, build_registry
from bridle.serving.tenancy.keys import KeyStore
from tests.http.harness import serving
from tests.serving.loaders import MIB, FakeLoader


@contextmanager
def server_of(
    loader: FakeLoader, settings: HttpSettings | None = None, keys: KeyStore | None = None, **options: Any
) -> Iterator[tuple[str, ModelRegistry]]:
    """Yield the address and the registry of a server that has the model `good`, and can load the loader's others."""
    allowed = tuple(name for name in loader.sizes if name != "good")
    models = ModelSet(("good",), allow_hub=allowed, max_memory=100 * MIB, **options)
    registry, load_named = build_registry(models, ModelConfig("good", kv_memory=MIB), loader)
    load_named()
    with serving(registry, settings, keys) as url:
        yield url, registry
