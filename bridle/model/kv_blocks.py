"""The blocks of a KV cache in this process's memory, and its recurrent states, as bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle.cpu_kernels.isa_targets import MANIFEST
from bridle.cpu_kernels.library import kernels
from bridle.distribution import NAME
from bridle.model.kv_cache import KVCache
from bridle.model.loaded_weights import LoadedWeights
from bridle.model.state_pool import StatePool
from bridle.model.weights_digest import weights_digest

#: The version of the layout below.
_EDITION = 1

_Parts = Sequence[NDArray[np.uint8]]  # each [blocks or slots, bytes], views
_NOTHING = np.empty(0, np.uint8)  # the block of a model without attention


class CacheBlocks:
    """Implements `bridle.engine.interfaces.KVBlocks` over a cache in host memory. A block is the bytes of its slots:
    layer after layer, of each the keys, the values, and the scales if there are any. A state is the bytes of its
    tensors, layer after layer."""

    def __init__(self, cache: KVCache, identity: Callable[[], str], states: StatePool | None = None) -> None:
        self.identity = identity
        both = parts_of(cache, states)
        self._parts, self._states = ([part.numpy() for part in parts] for parts in both)
        self.block_bytes = sum(part.shape[1] for part in self._parts)
        self.state_bytes = sum(part.shape[1] for part in self._states)

    def read_block(self, block: int) -> memoryview:
        return _gather(self._parts, block)

    def write_block(self, block: int, data: memoryview) -> None:
        _scatter(self._parts, block, data)

    def read_state(self, slot: int) -> memoryview:
        return _gather(self._states, slot)

    def write_state(self, slot: int, data: memoryview) -> None:
        _scatter(self._states, slot, data)


def parts_of(cache: KVCache, states: StatePool | None) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parts of blocks and those of states, each a view [blocks or slots, bytes]."""
    parts = [layer.blocks_of(part) for layer in cache.layers.values() for part in layer.parts]
    slots = [part.flatten(1) for layer in states.layers.values() for part in layer.values()] if states else []
    return [part.view(torch.uint8) for part in parts], [part.view(torch.uint8) for part in slots]


def _gather(parts: _Parts, number: int) -> memoryview:
    whole: Any = np.concatenate([part[number] for part in parts] or [_NOTHING])  # an array is a buffer
    return memoryview(whole)


def _scatter(parts: _Parts, number: int, data: memoryview) -> None:
    content, at = np.frombuffer(data, np.uint8), 0
    for part in parts:
        size = part.shape[1]
        part[number] = content[at : at + size]
        at += size


def kv_identity(loaded: LoadedWeights, cache: KVCache) -> str:
    """Return a digest of all that the KV of given tokens depends on. Reads all weights, if that was never done."""
    found = kernels()
    dtypes = {str(part.dtype) for layer in cache.layers.values() for part in layer.parts}
    parts = {
        "edition": _EDITION,
        "weights": weights_digest(loaded.checkpoint.folder),
        "dtype": str(loaded.dtype),
        "quantization": loaded.config.quantization,
        "max_model_len": loaded.max_model_len,  # scaled angles may depend on it
        "kv": [sorted(dtypes), cache.block_size],
        "states": repr(loaded.geometry.states),
        "kernels": [found.name, blake2b(MANIFEST.read_bytes()).hexdigest()] if found else [],
        "device": torch.cuda.get_device_name(cache.device) if cache.device.type == "cuda" else "",
        "versions": {name: _version(name) for name in ("torch", "transformers", NAME)},
    }
    return blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=16).hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # a checkout that is not installed
        return ""
