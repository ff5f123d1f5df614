"""LoRA adapters in steps that are captured as CUDA graphs. Adapter tiles have a fixed address on the device, and each
step writes its own tiles to that address. A launch of the adapter kernels always has the size of the largest possible
step. The largest possible step has the maximum number of tiles, adapters in every layer, and ranks up to `MOST_RANKS`.
Programs for unused tiles end at once, because an unused tile has no rows, and a table without sites. Programs for
ranks, parts and sites that an adapter lacks end at once, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bridle.lora.adapter_kernel import TriedKernel
from bridle.lora.fused import SHORT_TILE, TiledProduct, tiles_of
from bridle.lora.layout import AdapterLayout
from bridle.lora.ops import AdapterStep, Product, Segment
from bridle.lora.tables import extents_of
from bridle.model.h2d_copies import Staging

#: The largest rank of a layer in captured steps.
MOST_RANKS = 64
#: Numbers in a tile.
_TILE = 4


class AdapterTiles:
    """Device memory for up to `num_tiles` adapter tiles of a step. `layout_of_all` returns the layout of an adapter
    that changes every layer, for a given rank."""

    def __init__(
        self, kernel: TriedKernel, layout_of_all: Callable[[int], AdapterLayout], dtype: torch.dtype, num_tiles: int
    ) -> None:
        assert kernel.fused is not None, "plain torch is not captured"
        self._kernel, self._fused, self._dtype = kernel, kernel.fused, dtype
        device = self._fused.machine.device
        self._extents = extents_of(layout_of_all(MOST_RANKS))
        self._no_sites = torch.zeros(1, dtype=torch.int64, device=device)
        self._values = torch.zeros(num_tiles * _TILE, dtype=torch.int64, device=device)
        self._staging = Staging(self._values)

    def takes(self, segments: Sequence[Segment], num_tiles: int) -> bool:
        """Return whether a captured step with `num_tiles` tiles can compute the adapters of these segments."""
        if self._kernel.fused is None:
            return False  # fused kernels gave wrong products for one of the adapters that were tried
        if sum(-(-segment.length // SHORT_TILE) for segment in segments) > num_tiles:
            return False
        return all(table.part_rank <= MOST_RANKS for table in self._fused.tables(segments))

    def write(self, num_tiles: int, segments: Sequence[Segment]) -> object:
        """Copy the adapter tiles of a step to the device, for a graph that has `num_tiles` tiles. The caller must keep
        the result alive until the step is launched."""
        tables = self._fused.tables(segments)
        tiles = list(tiles_of(segments, [table.values.data_ptr() for table in tables], SHORT_TILE))
        numbers = self._staging.take()[: num_tiles * _TILE].reshape(num_tiles, _TILE)
        numbers[:] = (0, 0, 0, self._no_sites.data_ptr())
        if tiles:
            numbers[: len(tiles)] = np.array(tiles, np.int64)
        self._staging.send(num_tiles * _TILE)
        return segments, tables

    def step(self, num_tokens: int, num_tiles: int) -> AdapterStep:
        """Return the `AdapterStep` for capturing a step of `num_tokens` tokens and `num_tiles` tiles."""
        tiles = self._values[: num_tiles * _TILE].view(num_tiles, _TILE)
        product = TiledProduct(tiles, SHORT_TILE, self._extents, self._dtype, self._fused.machine)
        return AdapterStep((), num_tokens, _Only(product))


@dataclass(frozen=True, slots=True)
class _Only:
    """Implements `Multiplier` with one product, for row segments that are already on the device."""

    product: Product

    def products(self, segments: Sequence[Segment]) -> list[Product]:
        return [self.product]
