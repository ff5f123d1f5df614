"""The pool of keys and values of one loaded model, cut into blocks that the engine hands out.

A slot is one token's place: position p of a sequence lies in slot `block_table[p // B] * B + p % B` of every layer.
Layers may differ in heads and widths. Who owns which block is the engine's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bridle.model.geometry import Geometry, LayerGeometry


class LayerCache:
    """Keys [slots, Hkv, D] and values [slots, Hkv, Dv] of one layer."""

    __slots__ = ("block_size", "keys", "keys_by_head", "values", "values_by_head")

    def __init__(
        self, num_blocks: int, block_size: int, shape: LayerGeometry, dtype: torch.dtype, device: torch.device
    ) -> None:
        slots = num_blocks * block_size
        self.block_size = block_size
        # Uninitialized on purpose: pages are touched only when used, so a large pool costs nothing at start-up.
        self.keys = torch.empty(slots, shape.num_kv_heads, shape.key_dim, dtype=dtype, device=device)
        self.values = torch.empty(slots, shape.num_kv_heads, shape.value_dim, dtype=dtype, device=device)
        self.keys_by_head = self.keys.transpose(0, 1).unsqueeze(0)  # [1, Hkv, slots, D], a view
        self.values_by_head = self.values.transpose(0, 1).unsqueeze(0)  # [1, Hkv, slots, Dv], a view

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store `key` [T, Hkv, D] and `value` [T, Hkv, Dv] at `slots` [T]."""
        self.keys.index_copy_(0, slots, key)
        self.values.index_copy_(0, slots, value)

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks; all are read before any is written."""
        for pool in (self.keys, self.values):
            blocks = pool.view(-1, self.block_size * pool.shape[1] * pool.shape[2])  # [blocks, numbers]
            blocks.index_copy_(0, targets, blocks.index_select(0, sources))


class KVCache:
    """All layers' caches, keyed by layer number."""

    def __init__(
        self, geometry: Geometry, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.layers = {
            number: LayerCache(num_blocks, block_size, shape, dtype, device)
            for number, shape in geometry.layers.items()
        }

    @property
    def num_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers.values())

    def clear(self, num_blocks: int) -> None:
        """Fill the first blocks with zeros."""
        for layer in self.layers.values():
            layer.keys[: num_blocks * self.block_size] = 0
            layer.values[: num_blocks * self.block_size] = 0

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block source to block target in every layer, for each (source, target) of `pairs`."""
        sources, targets = torch.tensor(pairs, dtype=torch.int64, device=self.device).unbind(1)
        for layer in self.layers.values():
            layer.copy_blocks(sources, targets)
