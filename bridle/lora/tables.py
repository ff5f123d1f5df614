"""Tables of adapter layouts that the fused kernels read, and the maximum sizes of adapters at each site."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bridle.lora.layout import AdapterBlock, AdapterLayout
from bridle.lora.side_stream import used_by_steps

#: Largest alignment of columns that speeds up the kernels.
_MAX_STEP = 16


@dataclass(frozen=True, slots=True)
class Extent:
    """Maximum sizes of adapters at a site: ranks of all parts together, ranks of one part, number of parts, and columns
    of one part. The bounds of each part's columns are multiples of `step`."""

    rank: int
    part_rank: int
    num_parts: int
    num_columns: int
    step: int

    def over(self, other: Extent) -> Extent:
        """Return the smallest maximum sizes that cover this object and `other`."""
        return Extent(
            max(self.rank, other.rank),
            max(self.part_rank, other.part_rank),
            max(self.num_parts, other.num_parts),
            max(self.num_columns, other.num_columns),
            min(self.step, other.step),
        )


class Table:
    """A layout as the kernels read it, int64 on the device. The table has the number of sites, then a row for each
    site, then a row for each part."""

    def __init__(self, layout: AdapterLayout, device: torch.device) -> None:
        self.layout = layout
        self.extents = extents_of(layout)
        self.part_rank = max(extent.part_rank for extent in self.extents.values())
        self.values = used_by_steps(torch.tensor(table_values(layout), dtype=torch.int64, device=device))


def table_values(layout: AdapterLayout) -> list[int]:
    """Return the values of a layout's table. The row of a site has the offset and rank of A, the index of the first
    part's row, and the number of parts. The row of a part has the offset of B, the first column and the number of
    columns, and the first rank and the number of ranks."""
    num_sites = max(layout.blocks) + 1
    sites: list[int] = []
    parts: list[int] = []
    for site in range(num_sites):
        block = layout.blocks.get(site)
        if block is None:
            sites += [0, 0, 0, 0]
            continue
        sites += [block.begin, block.rank, 1 + 4 * num_sites + len(parts), len(block.parts)]
        for part in block.parts:
            parts += [part.begin, part.columns.begin, part.columns.size, part.ranks.begin, part.ranks.size]
    return [num_sites, *sites, *parts]


def extents_of(layout: AdapterLayout) -> dict[int, Extent]:
    return {site: _extent(block) for site, block in layout.blocks.items()}


def _extent(block: AdapterBlock) -> Extent:
    edges = [edge for part in block.parts for edge in part.columns]
    return Extent(
        block.rank,
        max(part.ranks.size for part in block.parts),
        len(block.parts),
        max(part.columns.size for part in block.parts),
        min(_MAX_STEP, *(edge & -edge for edge in edges if edge)),
    )
