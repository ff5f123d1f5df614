"""The KV cache of one loaded model: a pool of blocks, which the engine assigns to sequences. A slot holds one token.
With B tokens per block, position p of a sequence is in slot `block_table[p // B] * B + p % B` of every layer. Layers
may differ in heads and widths. The cache may have another type than the model; keys and values are then rounded when
they are written. The engine, not this module, records which sequence owns which block.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from bridle.cpu_kernels.huge_pages import alloc_huge_pages
from bridle.cpu_kernels.layers import LayerKV
from bridle.model.block_copies import BlockCopier, BlockPools
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.h2d_copies import ALIGNMENT, upload


def token_bytes(geometry: Geometry, dtype: torch.dtype) -> int:
    """Return the bytes that the keys and values of one token take in all layers."""
    scales = sum(shape.num_kv_heads for shape in geometry.cached.values()) if dtype is torch.int8 else 0
    return geometry.numbers_per_token * dtype.itemsize + 2 * torch.float32.itemsize * scales


class LayerCache:
    """The cached keys [slots, Hkv, D] and values [slots, Hkv, Dv] of one layer. Cached values are floating point, or 8
    bits with a scale for each head of a slot [slots, Hkv]."""

    __slots__ = ("block_size", "key_scales", "keys", "keys_by_head", "value_scales", "values", "values_by_head")

    def __init__(
        self, num_blocks: int, block_size: int, shape: LayerGeometry, dtype: torch.dtype, memory: KVMemory
    ) -> None:
        slots, heads, device = num_blocks * block_size, shape.num_kv_heads, memory.device
        self.block_size = block_size
        # Uninitialized on purpose: the system allocates pages on first use, so a large pool costs nothing at start-up.
        self.keys = memory.take((slots, heads, shape.key_dim), dtype)
        self.values = memory.take((slots, heads, shape.value_dim), dtype)
        self.keys_by_head = self.keys.transpose(0, 1).unsqueeze(0)  # [1, Hkv, slots, D], a view
        self.values_by_head = self.values.transpose(0, 1).unsqueeze(0)  # [1, Hkv, slots, Dv], a view
        self.key_scales: Tensor | None = None
        self.value_scales: Tensor | None = None
        if dtype is torch.int8:
            self.key_scales = torch.empty(slots, heads, dtype=torch.float32, device=device)
            self.value_scales = torch.empty_like(self.key_scales)

    @property
    def parts(self) -> list[Tensor]:
        """Return this layer's tensors: keys and values, and their scales if there are any."""
        tensors = (self.keys, self.values, self.key_scales, self.value_scales)
        return [tensor for tensor in tensors if tensor is not None and tensor.numel()]

    @property
    def pool(self) -> LayerKV:
        """Return the layer's keys and values as an argument for the C kernels."""
        return LayerKV(self.keys, self.values, self.key_scales, self.value_scales)

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store the keys `key` [T, Hkv, D] and the values `value` [T, Hkv, Dv] at `slots` [T]."""
        for numbers, scales, new in ((self.keys, self.key_scales, key), (self.values, self.value_scales, value)):
            if scales is not None:
                new, scale = round_heads(new)
                scales.index_copy_(0, slots, scale)
            numbers.index_copy_(0, slots, new.to(numbers.dtype))

    def view(self, slot: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys [1, Hkv, L, D] and values [1, Hkv, L, Dv] of `count` slots from `slot` on, as values of `dtype`.
        The results are views if the cache has type `dtype`, and converted copies otherwise."""
        keys, values = self.keys_by_head.narrow(2, slot, count), self.values_by_head.narrow(2, slot, count)
        if keys.dtype is dtype:
            return keys, values
        return self._restore(keys, values, slice(slot, slot + count), dtype)

    def gather(self, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return copies of keys and values for any slots [L], in the shapes that `view` returns."""
        keys, values = (pool.index_select(0, slots).transpose(0, 1).unsqueeze(0) for pool in (self.keys, self.values))
        return (keys, values) if keys.dtype is dtype else self._restore(keys, values, slots, dtype)

    def _restore(
        self, keys: Tensor, values: Tensor, slots: slice | Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        if self.key_scales is None or self.value_scales is None:
            return keys.to(dtype), values.to(dtype)
        scales = (scales[slots].t()[None, :, :, None] for scales in (self.key_scales, self.value_scales))
        restored = (part.float() * scale for part, scale in zip((keys, values), scales, strict=True))
        first, second = (part.to(dtype) for part in restored)
        return first, second

    def blocks_of(self, part: Tensor) -> Tensor:
        """Return a view [blocks, values] of a tensor that consists of `parts`."""
        return part.view(-1, self.block_size * part[0].numel())

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks. All sources are read before any target is written."""
        for blocks in map(self.blocks_of, self.parts):
            blocks.index_copy_(0, targets, blocks.index_select(0, sources))


class KVMemory:
    """Allocates memory for keys and values. On CPUs all layers are in one allocation, so that all parts of a block can
    be copied at once."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.device = device
        self._room = alloc_huge_pages(num_bytes) if device.type == "cpu" else None

    def take(self, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        if self._room is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        part, self._room = self._room.tensor_split([prod(shape) * dtype.itemsize])
        return part.view(dtype).view(shape)


def round_heads(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Round heads [T, H, D] to 8-bit integers. Return the integers as floats, and their scales [T, H]."""
    wide = heads.float()
    scale = wide.abs().amax(-1).div(127).clamp_min(1e-12)
    return torch.round(wide / scale.unsqueeze(-1)), scale


class KVCache:
    """The caches of all layers, and of index keys, by layer number (see `Geometry.cached`)."""

    def __init__(
        self,
        geometry: Geometry,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        copier: BlockCopier | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        slots = num_blocks * block_size
        memory = KVMemory(slots * geometry.numbers_per_token * dtype.itemsize, device)
        self.layers = {
            number: LayerCache(num_blocks, block_size, shape, dtype, memory)
            for number, shape in geometry.cached.items()
        }
        self._copier, self._pools = copier, None
        if copier is not None:
            blocks = [layer.blocks_of(part) for layer in self.layers.values() for part in layer.parts]
            is_even = all(each.stride(0) * each.element_size() % ALIGNMENT == 0 for each in blocks)
            self._pools = BlockPools(blocks, device) if is_even else None

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for layer in self.layers.values() for part in layer.parts)

    def clear(self, num_blocks: int, layers: Sequence[int] | None = None) -> None:
        """Fill the first `num_blocks` blocks with zeros, in all layers or only in `layers`."""
        for number in self.layers if layers is None else layers:
            for part in self.layers[number].parts:
                part[: num_blocks * self.block_size] = 0

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """In every layer, copy block `source` to block `target` for each (source, target) in `pairs`. All sources are
        read before any target is written."""
        there = upload(np.array(pairs, np.int64), self.device)  # [N, 2]
        sources, targets = map(set, zip(*pairs, strict=True))
        if self._copier is not None and self._pools is not None and sources.isdisjoint(targets):
            self._copier.copy(there, self._pools)
            return
        for layer in self.layers.values():
            layer.copy_blocks(*there.unbind(1))
