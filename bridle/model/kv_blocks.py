"""Reads and writes KV blocks and recurrent states in host memory as bytes."""

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

#: The version of the byte layout of this module.
_EDITION = 1

_Parts = Sequence[NDArray[np.uint8]]  # each [parts, blocks or slots, bytes], views
_NOTHING = np.empty(0, np.uint8)  # the block of a model without attention


class CacheBlocks:
    """Implements `bridle.engine.interfaces.KVBlocks` over a cache in host memory. A block's bytes are its slots, layer
    after layer: keys, values, and scales if the cache has 8-bit values. The bytes of a recurrent state are its tensors,
    layer after layer."""

    def __init__(self, cache: KVCache, identity: Callable[[], str], states: StatePool | None = None) -> None:
        self.identity, self._held = identity, (cache, states)  # whose memory the views below do not hold
        self.parts, self._states = map(_stacked, parts_of(cache, states))
        self.block_bytes, self.state_bytes = (
            sum(part.shape[0] * part.shape[2] for part in parts) for parts in (self.parts, self._states)
        )

    def read_block(self, block: int) -> memoryview:
        return _gather(self.parts, block)

    def write_block(self, block: int, data: memoryview) -> None:
        _scatter(self.parts, block, data)

    def read_state(self, slot: int) -> memoryview:
        return _gather(self._states, slot)

    def write_state(self, slot: int, data: memoryview) -> None:
        _scatter(self._states, slot, data)


def parts_of(cache: KVCache, states: StatePool | None) -> tuple[list[Tensor], list[Tensor]]:
    """Return views of the cache that together hold all KV blocks, and views that together hold all recurrent states.
    Each view is [blocks or slots, bytes]."""
    parts = [layer.blocks_of(part) for layer in cache.layers.values() for part in layer.parts]
    slots = [part.flatten(1) for layer in states.layers.values() for part in layer.values()] if states else []
    return [part.view(torch.uint8) for part in parts], [part.view(torch.uint8) for part in slots]


def _stacked(parts: Sequence[Tensor]) -> _Parts:
    """Return the tensors `parts` as views [parts, blocks or slots, bytes]. Parts of equal size at equal distances in
    memory share a view, for example if all layers are alike. A view is copied in one operation, which does not block
    other Python threads."""
    found: list[list[NDArray[np.uint8]]] = []
    for part in (each.numpy() for each in parts):
        if not (found and _continues(found[-1], part)):
            found.append([])
        found[-1].append(part)
    return [
        np.lib.stride_tricks.as_strided(run[0], (len(run), *run[0].shape), (_distance(run), *run[0].strides))
        for run in found
    ]


def _continues(run: Sequence[NDArray[np.uint8]], part: NDArray[np.uint8]) -> bool:
    first, last = run[0], run[-1]
    step = _address(part) - _address(last)
    is_next = part.shape == first.shape and part.strides == first.strides and step >= part.nbytes
    return is_next and (len(run) == 1 or step == _distance(run))


def _distance(run: Sequence[NDArray[np.uint8]]) -> int:
    return _address(run[1]) - _address(run[0]) if len(run) > 1 else run[0].nbytes


def _address(part: NDArray[np.uint8]) -> int:
    return int(part.__array_interface__["data"][0])


def _gather(parts: _Parts, number: int) -> memoryview:
    pieces = [part[:, number].ravel() for part in parts] or [_NOTHING]  # copies
    whole: Any = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)  # a numpy array supports the buffer protocol
    return memoryview(whole)


def _scatter(parts: _Parts, number: int, data: memoryview) -> None:
    content, at = np.frombuffer(data, np.uint8), 0
    for part in parts:
        count, _, size = part.shape
        part[:, number] = content[at : at + count * size].reshape(count, size)
        at += count * size


def kv_identity(loaded: LoadedWeights, cache: KVCache) -> str:
    """Return a digest of everything other than the tokens that KV values depend on. Reads all weights if their digest
    is not known yet."""
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
