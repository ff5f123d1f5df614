"""Compares fused products with plain torch on random numbers, before a step relies on them.

There is one trial for each shape of a site that adapters bring: with few rows, with many, and with both at once, with
rows between them that have no adapter. A trial needs memory for the weights of one site.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bridle.lora.layout import Block, Layout, Part
from bridle.lora.product import AdapterStep, Products, Segment
from bridle.lora.torch_product import TorchProducts
from bridle.lora.weights import PlacedAdapter

TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
#: The lengths of the segments in each trial. One row without an adapter stands before each segment.
_TRIALS = ((1, 3), (70, 1))


class Trial:
    """Runs trials, and remembers which shapes were tried."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._tried: set[Block] = set()

    def run(self, layout: Layout, products: Products) -> str | None:
        """Try the shapes of sites that are new in this layout. Returns what is wrong, or None."""
        for block in layout.blocks.values():
            alone = _alone(block)
            if alone in self._tried:
                continue
            for lengths in _TRIALS:
                problem = self._try(alone, lengths, products)
                if problem is not None:
                    return problem
            self._tried.add(alone)
        return None

    def _try(self, block: Block, lengths: tuple[int, ...], products: Products) -> str | None:
        generator = torch.Generator().manual_seed(block.rank)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self._device, self._dtype)

        layout = Layout({0: block}, block.end)
        segments, stop = [], 0
        for length in lengths:
            # At this scale the hidden sums and what they add are about as large as the numbers that they are added to.
            flat = random(layout.num_values) / math.sqrt(math.sqrt(block.num_inputs * block.rank))
            segments.append(Segment(stop + 1, stop + 1 + length, PlacedAdapter(layout, flat)))
            stop += 1 + length
        rows, base = random(stop + 1, block.num_inputs), random(stop + 1, block.parts[-1].columns.end)
        want, have = base.clone(), base.clone()
        with torch.inference_mode():
            for way, out in ((TorchProducts(), want), (products, have)):
                AdapterStep(segments, stop + 1, way).add(0, out, rows)
        error = float((want.float() - have.float()).abs().max())
        limit = TOLERANCES[self._dtype] * max(1.0, float(want.abs().max()))
        if error <= limit:  # false for what is not a number
            return None
        return f"rank {block.rank} over {block.num_inputs} features differs by {error:.3g} (limit {limit:.3g})"


def _alone(block: Block) -> Block:
    """A layout of one block of the same shape, whose layers have no names."""
    parts = tuple(Part("", part.columns, part.ranks, part.begin - block.begin) for part in block.parts)
    return Block(0, block.rank, block.num_inputs, parts)
