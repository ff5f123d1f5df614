"""Random steps of many adapters for the fused kernel, and the same computation in plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from bridle.lora.adapter_kernel import TOLERANCES
from bridle.lora.layout import AdapterLayout, AdapterPlacement, IndexRange, LayoutCache
from bridle.lora.ops import AdapterKernel, AdapterStep, Segment
from bridle.lora.peft_config import LoraShape
from bridle.lora.torch_ops import TorchKernel
from bridle.lora.weights import PlacedAdapter

#: Ranks: padded or not, a block of the kernels and more than one.
RANKS = (1, 4, 8, 9, 16, 24, 64, 72)
LENGTHS = (1, 1, 1, 1, 2, 3, 15, 16, 17, 40, 64, 65, 130)


@dataclass(frozen=True)
class Sides:
    """Sizes of a group of layers with a common input: inputs, columns of each layer, and columns of no layer."""

    num_inputs: int
    columns: tuple[int, ...]
    num_more: int = 0

    @property
    def num_outputs(self) -> int:
        return sum(self.columns) + self.num_more


def random_sides(random: Random) -> list[Sides]:
    """Return three groups: one of several layers, one of a single layer, and one whose sizes are no multiples of 8."""
    inputs, columns = (8, 64, 136, 272), (8, 16, 40, 128, 144)
    return [
        Sides(random.choice(inputs), tuple(random.choices(columns, k=random.randint(2, 4))), random.choice((0, 16))),
        Sides(random.choice(inputs), (random.choice(columns),)),
        Sides(random.randint(1, 300), tuple(random.randint(1, 150) for _ in range(random.randint(1, 3))), 3),
    ]


def places_of(sites: list[Sides]) -> dict[str, AdapterPlacement]:
    """Return the placement of each layer, whose name has the numbers of its group and of the layer."""
    places = {}
    for site, sides in enumerate(sites):
        begin = 0
        for number, size in enumerate(sides.columns):
            place = AdapterPlacement(
                site, IndexRange(begin, begin + size), IndexRange(0, sides.num_inputs), IndexRange(0, size)
            )
            places[f"{site}.{number}"] = place
            begin += size
    return places


def make_adapter(
    layouts: LayoutCache, places: dict[str, AdapterPlacement], ranks: dict[str, int], like: Tensor, seed: int
) -> PlacedAdapter:
    """Return an adapter of random numbers, whose output for random rows is about as large as 1."""
    shapes = {
        name: LoraShape(rank, places[name].inputs.size, places[name].columns.size, 1.0) for name, rank in ranks.items()
    }
    layout = layouts.of(shapes)
    flat = torch.randn(layout.num_values, generator=torch.Generator().manual_seed(seed))
    return PlacedAdapter(layout, (flat * _scale(layout)).to(like))


def _scale(layout: AdapterLayout) -> float:
    size = max(block.num_inputs * block.rank for block in layout.blocks.values())
    return 1 / math.sqrt(math.sqrt(size))


def random_adapters(random: Random, sites: list[Sides], like: Tensor, count: int) -> list[PlacedAdapter]:
    """Return adapters of random layers and ranks; some of them share a layout."""
    places, layouts = places_of(sites), LayoutCache(places_of(sites))
    kinds = []
    for _ in range(3):
        names = random.sample(sorted(places), random.randint(1, len(places)))
        kinds.append({name: random.choice(RANKS) for name in names})
    return [make_adapter(layouts, places, random.choice(kinds), like, number) for number in range(count)]


def random_segments(random: Random, adapters: list[PlacedAdapter], max_tokens: int) -> tuple[list[Segment], int]:
    """Return random segments with gaps between them, whose adapters may repeat, and the number of rows."""
    position, segments = 0, []
    for adapter in random.choices(adapters, k=random.randint(1, len(adapters))):
        position += random.choice((0, 0, 0, 1, 5))
        length = min(random.choice(LENGTHS), max_tokens - position)
        if length <= 0:
            break
        segments.append(Segment(position, position + length, adapter))
        position += length
    return segments, position + random.choice((0, 3))


def check_step(kernel: AdapterKernel, segments: list[Segment], num_tokens: int, sites: list[Sides]) -> None:
    """Check that a step gives plain torch's result, gives the same bits each time, and leaves rows without adapters
    unchanged."""
    like = segments[0].adapter.flat
    free = torch.ones(num_tokens, dtype=torch.bool)
    for segment in segments:
        free[segment.start : segment.stop] = False
    generator = torch.Generator().manual_seed(num_tokens)
    step, plain = AdapterStep(segments, num_tokens, kernel), AdapterStep(segments, num_tokens, TorchKernel())
    assert set(step.by_site) == set(plain.by_site)
    for site in step.by_site:
        rows = torch.randn(num_tokens, sites[site].num_inputs, generator=generator)
        rows[free] = math.nan  # nobody reads them
        rows = rows.to(like)
        base = torch.randn(num_tokens, sites[site].num_outputs, generator=generator).to(like)
        have, again, want = base.clone(), base.clone(), base.clone()
        step.add(site, have.unsqueeze(0), rows.unsqueeze(0))
        step.add(site, again, rows)
        plain.add(site, want, rows)
        assert torch.equal(have, again), "the same step gives the same bits"
        assert torch.equal(have[free.to(have.device)], base[free.to(have.device)]), "rows without an adapter stay"
        limit = TOLERANCES[like.dtype] * max(1.0, float(want.abs().max()))
        assert float((have.float() - want.float()).abs().max()) <= limit


def check_any_step(kernel: AdapterKernel, seed: int, like: Tensor, *, max_tokens: int) -> None:
    """Check two random steps with different segments of the same adapters."""
    random = Random(seed)
    sites = random_sides(random)
    adapters = random_adapters(random, sites, like, 6)
    for _ in range(2):
        check_step(kernel, *random_segments(random, adapters, max_tokens), sites)
