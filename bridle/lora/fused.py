"""Applies many adapters with two Triton kernels for each adapted layer (site). Used on CUDA.

The first kernel multiplies rows by the A of their adapter, which gives one value per rank. The second kernel multiplies
the first kernel's result by B and adds the product to the layer's output. Rows are cut into *tiles*, each of one
adapter, and a program of a kernel computes a part of one tile. A tile has the addresses of its adapter's flat tensor
and of a *table*. A *table* has the offsets of each site's matrices in the flat tensors of one layout. One launch
therefore computes adapters of any ranks and layers, without copying their weights together. Rows without an adapter
belong to no tile.

Both kernels accumulate in float32, and the first kernel's result is float32 in memory. The second kernel rounds the
first kernel's result to the weights' type when it multiplies, as plain torch does. There are no atomic additions, so a
step gives the same bits each time.

Block sizes depend on a step's longest segment, the ranks, and the type of the weights. Block sizes are not tuned at run
time, because the kernel must be compiled for each size. There are few block sizes, so all kernels of an adapter can be
compiled before its first use. If a step has few tiles, the first kernel divides the inputs into parts, to have enough
parallel work. The first kernel keeps the sums of the parts separate, and the second kernel adds them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bridle.errors import InternalError
from bridle.lora.layout import AdapterLayout
from bridle.lora.ops import Product, Segment
from bridle.lora.tables import Extent, Table
from bridle.lora.weights import PlacedAdapter

#: Rows of a tile if every segment is short, as in decoding, and otherwise. 16 is the minimum that tensor cores
#: multiply.
SHORT_TILE, LONG_TILE = 16, 64
#: Bytes of a row of inputs that a program loads at once, small enough for the shared memory of any GPU.
INPUT_BYTES = {SHORT_TILE: 256, LONG_TILE: 128}
#: Minimum and maximum ranks that one program multiplies at once; further ranks need further programs, or iterations of
#: a loop.
MIN_RANKS, MAX_RANKS = 16, 64
#: Columns that one program of the second kernel computes. Together with the ranks of one iteration they fit into
#: registers.
COLUMNS = {SHORT_TILE: 128, LONG_TILE: 64}
RANK_BYTES = 64
#: Inputs of a part at least, and maximum number of parts, when the inputs are divided.
MIN_SHARE, MAX_SHARES = 256, 16
#: Number of programs per multiprocessor that keeps a GPU busy.
_ENOUGH = 2
#: Maximum number of tables in the cache, about 10 KB each.
_MAX_TABLES = 256


def is_interpreted() -> bool:
    """Return whether Triton runs kernels in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


class Tile(NamedTuple):
    """Rows `start` to `stop` (exclusive) of one adapter, with the addresses of the adapter's weights and of its
    layout's table. The kernels read the fields of a tile in this order."""

    start: int
    stop: int
    weights: int
    table: int


def tiles_of(segments: Sequence[Segment], tables: Sequence[int], size: int) -> Iterator[Tile]:
    """Cut segments into tiles of at most `size` rows. `tables` are the layout tables' addresses, one per segment."""
    for segment, table in zip(segments, tables, strict=True):
        weights = segment.adapter.flat.data_ptr()
        for start in range(segment.start, segment.stop, size):
            yield Tile(start, min(start + size, segment.stop), weights, table)


class Machine:
    """A device that runs kernels, with its compute `capability` if it is a GPU. `enough` is the number of programs
    (thread blocks) that keeps the device busy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_wide = is_interpreted()
        self.enough = _ENOUGH
        self.capability = (0, 0)
        if device.type == "cuda":
            self.capability = torch.cuda.get_device_capability(device)
            self.enough *= torch.cuda.get_device_properties(device).multi_processor_count

    @cached_property
    def kernels(self) -> Any:
        """Return the module of Triton kernels. The module is imported when an adapter is first used, because the import
        takes a moment and needs Triton."""
        from bridle.lora import fused_kernels

        return fused_kernels

    def chosen(self) -> AbstractContextManager[Any]:
        """Inside the `with` block, this device is the thread's current device, on which Triton launches kernels."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


class FusedKernel:
    """Implements `AdapterKernel`: computes all segments of a step as one product."""

    def __init__(self, device: torch.device) -> None:
        self.machine = Machine(device)
        self._tables: dict[int, Table] = {}
        self._lock = Lock()  # adapters are prepared in other threads than the steps' thread

    def prepare(self, adapter: PlacedAdapter) -> None:
        """Write the table of an adapter's layout to the device."""
        self._table(adapter.layout)

    def products(self, segments: Sequence[Segment]) -> list[Product]:
        return [FusedProduct(segments, self.tables(segments), self.machine)]

    def tables(self, segments: Sequence[Segment]) -> list[Table]:
        """Return the layout table of each segment's adapter."""
        return [self._table(segment.adapter.layout) for segment in segments]

    def clear(self) -> None:
        with self._lock:
            self._tables.clear()

    def _table(self, layout: AdapterLayout) -> Table:
        with self._lock:
            known = self._tables.get(id(layout))
            if known is None:
                if len(self._tables) >= _MAX_TABLES:
                    del self._tables[next(iter(self._tables))]
                known = self._tables[id(layout)] = Table(layout, self.machine.device)
            return known


class TiledProduct:
    """Product of `tiles` [N, 4], each of at most `tile_size` rows. `extents` has the maximum sizes of the adapters at
    each site."""

    def __init__(
        self, tiles: Tensor, tile_size: int, extents: Mapping[int, Extent], dtype: torch.dtype, machine: Machine
    ) -> None:
        self.tiles, self._tile_size, self._num_tiles = tiles, tile_size, tiles.shape[0]
        self._extents, self._dtype, self._machine = extents, dtype, machine

    @property
    def sites(self) -> Iterable[int]:
        return self._extents

    def add(self, site: int, out: Tensor, rows: Tensor) -> None:
        if not (rows.dtype is out.dtype is self._dtype) or out.stride(1) != 1:
            raise InternalError(f"adapters of {self._dtype} cannot be added to {out.dtype} with strides {out.stride()}")
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        extent = self._extents[site]
        with self._machine.chosen():
            hidden = self.shrink(site, extent, rows)
            self._expand(site, extent, hidden, out)

    def shrink(self, site: int, extent: Extent, rows: Tensor) -> Tensor:
        """Multiply rows by A: [T, in] -> [shares, T, ranks], float32. In the result, rows without an adapter, and ranks
        that a row's adapter lacks, are undefined."""
        num_inputs = rows.shape[1]
        block_inputs = INPUT_BYTES[self._tile_size] // rows.element_size()
        block_ranks = _block(extent.rank)
        num_rank_blocks = _divide(extent.rank, block_ranks)
        share = self._share(num_inputs, self._num_tiles * num_rank_blocks, block_inputs)
        num_shares = _divide(num_inputs, share)
        hidden = rows.new_empty(num_shares, rows.shape[0], num_rank_blocks * block_ranks, dtype=torch.float32)
        self._machine.kernels.shrink[(self._num_tiles, num_rank_blocks, num_shares)](
            rows,
            hidden,
            self.tiles,
            site,
            num_inputs,
            rows.stride(0),
            share,
            hidden.stride(0),
            hidden.stride(1),
            block_rows=self._tile_size,
            block_ranks=block_ranks,
            block_inputs=block_inputs,
            is_wide=self._machine.is_wide,
        )
        return hidden

    def _share(self, num_inputs: int, num_programs: int, block_inputs: int) -> int:
        """Return the number of inputs that one program of the first kernel multiplies."""
        num_shares = min(_divide(self._machine.enough, num_programs), num_inputs // MIN_SHARE, MAX_SHARES)
        return _divide(_divide(num_inputs, max(num_shares, 1)), block_inputs) * block_inputs

    def _expand(self, site: int, extent: Extent, hidden: Tensor, out: Tensor) -> None:
        """Multiply by B and add to the outputs: [shares, T, ranks] -> [T, columns]."""
        block_columns = COLUMNS[self._tile_size]
        num_column_blocks = _divide(extent.num_columns, block_columns)
        self._machine.kernels.expand[(self._num_tiles, num_column_blocks, extent.num_parts)](
            hidden,
            out,
            self.tiles,
            site,
            hidden.shape[0],
            hidden.stride(0),
            hidden.stride(1),
            out.stride(0),
            block_rows=self._tile_size,
            block_ranks=min(_block(extent.part_rank), RANK_BYTES // out.element_size()),
            block_columns=block_columns,
            column_step=extent.step,
            is_wide=self._machine.is_wide,
        )


class FusedProduct(TiledProduct):
    """Product of segments whose adapters may have different layouts. The tiles hold the addresses of adapters and
    tables, so this object keeps adapters and tables alive."""

    def __init__(self, segments: Sequence[Segment], tables: Sequence[Table], machine: Machine) -> None:
        self.held = segments, tables
        longest = max(segment.length for segment in segments)
        size = SHORT_TILE if longest <= SHORT_TILE else LONG_TILE
        tiles = list(tiles_of(segments, [table.values.data_ptr() for table in tables], size))
        on_host = torch.tensor(tiles, dtype=torch.int64, pin_memory=machine.device.type == "cuda")
        on_device = on_host.to(machine.device, non_blocking=True)  # [tiles, 4]
        super().__init__(on_device, size, _join(tables), segments[0].adapter.flat.dtype, machine)


def _join(tables: Sequence[Table]) -> Mapping[int, Extent]:
    """Return the maximum sizes at each site over all layout tables."""
    distinct = list({id(table): table for table in tables}.values())
    if len(distinct) == 1:
        return distinct[0].extents
    joined: dict[int, Extent] = {}
    for table in distinct:
        for site, extent in table.extents.items():
            known = joined.get(site)
            joined[site] = extent if known is None else known.over(extent)
    return joined


def _block(rank: int) -> int:
    """Return the number of ranks that a program computes: `rank` rounded up to a power of two, within `MIN_RANKS` and
    `MAX_RANKS`."""
    return min(max(MIN_RANKS, 1 << (rank - 1).bit_length()), MAX_RANKS)


def _divide(number: int, by: int) -> int:
    """Return the quotient rounded up."""
    return -(-number // by)
