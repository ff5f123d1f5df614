"""Memory layout of an adapter: one flat tensor, with a block for each site that the adapter changes. A *site* is a
matrix product that the model computes. Most sites are one linear layer. If the model computes several layers as one
product (queries, keys and values, for example), each of these layers is a part of one site. The A matrices of all parts
of a site are concatenated, so that one product computes them. Each part's B adds to the columns of that part. Ranks are
padded with zeros to a multiple of `RANK_STEP`, so that more adapters have the same layout and can be multiplied
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from bridle.lora.peft_config import LoraShape

RANK_STEP = 8
_MAX_LAYOUTS = 256


def padded(rank: int) -> int:
    """Return the rank that is stored in memory: `rank` rounded up to a multiple of `RANK_STEP`."""
    return -(-rank // RANK_STEP) * RANK_STEP


class IndexRange(NamedTuple):
    """The range from `begin` to `end` (exclusive)."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class AdapterPlacement:
    """Position of an adapted layer in a site: the layer's outputs are the site's `columns`. With tensor parallelism,
    this process has only the range `inputs` of the layer's inputs and the range `outputs` of its outputs."""

    site: int
    columns: IndexRange
    inputs: IndexRange
    outputs: IndexRange


@dataclass(frozen=True, slots=True)
class LayerPart:
    """The part of a site that one layer has. The layer's B [columns, ranks] is at offset `begin`, and multiplies the
    `ranks` of the product with A."""

    layer: str
    columns: IndexRange
    ranks: IndexRange
    begin: int


@dataclass(frozen=True, slots=True)
class AdapterBlock:
    """Weights of an adapter at one site: A is [rank, num_inputs] at offset `begin`."""

    begin: int
    rank: int
    num_inputs: int
    parts: tuple[LayerPart, ...]

    @property
    def end(self) -> int:
        """Return the offset after this block's last value, where the next block begins."""
        last = self.parts[-1]
        return last.begin + last.columns.size * last.ranks.size


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """The blocks of an adapter, by site, in one flat tensor of `num_values` values."""

    blocks: Mapping[int, AdapterBlock]
    num_values: int


def make_layout(shapes: Mapping[str, LoraShape], places: Mapping[str, AdapterPlacement]) -> AdapterLayout:
    """Lay out an adapter whose layers have these `shapes`. `places` has the position of each layer in a site."""
    by_site: dict[int, list[str]] = {}
    for name in sorted(shapes, key=lambda name: (places[name].site, places[name].columns)):
        by_site.setdefault(places[name].site, []).append(name)
    blocks, end = {}, 0
    for site, names in by_site.items():
        blocks[site] = _make_block(names, shapes, places, end)
        end = blocks[site].end
    return AdapterLayout(blocks, end)


def _make_block(
    names: list[str], shapes: Mapping[str, LoraShape], places: Mapping[str, AdapterPlacement], begin: int
) -> AdapterBlock:
    spans, rank = [], 0
    for name in names:
        width = padded(shapes[name].rank)
        spans.append(IndexRange(rank, rank + width))
        rank += width
    num_inputs = places[names[0]].inputs.size
    parts, end = [], begin + rank * num_inputs
    for name, ranks in zip(names, spans, strict=True):
        parts.append(LayerPart(name, places[name].columns, ranks, end))
        end += places[name].columns.size * ranks.size
    return AdapterBlock(begin, rank, num_inputs, tuple(parts))


class LayoutCache:
    """All adapters with equal layouts share one layout object, because only adapters with the same object can be
    multiplied together."""

    def __init__(self, places: Mapping[str, AdapterPlacement]) -> None:
        self._places = places
        self._known: dict[tuple[tuple[str, int], ...], AdapterLayout] = {}

    def of(self, shapes: Mapping[str, LoraShape]) -> AdapterLayout:
        """Return the layout of an adapter; adapters with the same layers and padded ranks get the same object."""
        key = tuple((name, padded(shape.rank)) for name, shape in sorted(shapes.items()))
        layout = self._known.get(key)
        if layout is None:
            if len(self._known) >= _MAX_LAYOUTS:
                self._known.clear()
            layout = self._known[key] = make_layout(shapes, self._places)
        return layout
