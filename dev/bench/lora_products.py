"""Cost of one step's adapters in one layer on a GPU: the fused kernels compared to plain torch.

The layer computes queries, keys and values of a model with 8 billion weights, and all three have adapters. Each kernel
runs many times over the same step. A figure is the median of all rounds in microseconds. It includes kernel launches,
because the engine needs them as well.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bridle.lora.adapter_kernel import create_adapter_kernel
from bridle.lora.layout import AdapterPlacement, IndexRange, LayoutCache
from bridle.lora.ops import AdapterKernel, AdapterStep, Segment
from bridle.lora.peft_config import LoraShape
from bridle.lora.torch_ops import TorchKernel
from bridle.lora.weights import PlacedAdapter

if TYPE_CHECKING:
    from rich.console import Console

_NUM_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Mix:
    """The number of rows of each adapter in a step, and the adapters' ranks."""

    name: str
    lengths: tuple[int, ...]
    ranks: tuple[int, ...] = (16,)


MIXES = (
    Mix("64 rows, 1 adapter", (64,)),
    Mix("64 rows, 4 adapters", (16,) * 4),
    Mix("64 rows, 64 adapters", (1,) * 64),
    Mix("64 rows, 64 adapters of ranks 8 to 64", (1,) * 64, (8, 16, 32, 64)),
    Mix("63 rows, 63 adapters, and 1024 tokens of a prompt", (*[1] * 63, 1024)),
    Mix("4096 tokens of a prompt", (4096,)),
)


@dataclass(frozen=True, slots=True)
class ProductFigure:
    """Microseconds of one `Mix`, by kernel."""

    name: str
    microseconds: Mapping[str, float]


def measure_products(console: Console) -> list[ProductFigure]:
    """Measure each `Mix` with both kernels on the GPU, in bfloat16, and print one table."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    ways = {"torch": TorchKernel(), "fused": create_adapter_kernel("fused", device, dtype)}
    with console.status("products"):
        figures = [time_mix(mix, ways, torch.empty(0, dtype=dtype, device=device)) for mix in MIXES]
    _print_table(console, figures)
    return figures


def time_mix(
    mix: Mix,
    ways: Mapping[str, AdapterKernel],
    like: Tensor,
    sides: tuple[int, Sequence[int]] = (4096, (4096, 1024, 1024)),
    num_repeats: int = 100,
) -> ProductFigure:
    """Measure one `Mix` in a layer with the given numbers of input and output features."""
    num_inputs, columns = sides
    segments = _segments(mix, num_inputs, columns, like)
    num_tokens = segments[-1].stop
    rows = torch.randn(num_tokens, num_inputs, device=like.device).to(like.dtype)
    out = torch.zeros(num_tokens, sum(columns), device=like.device, dtype=like.dtype)
    taken = {}
    with torch.inference_mode():
        for name, kernel in ways.items():
            for segment in segments:
                kernel.prepare(segment.adapter)
            step = AdapterStep(segments, num_tokens, kernel)
            _time(step, out, rows, num_repeats)
            taken[name] = median(_time(step, out, rows, num_repeats) for _ in range(_NUM_ROUNDS))
    return ProductFigure(mix.name, taken)


def _time(step: AdapterStep, out: Tensor, rows: Tensor, num_repeats: int) -> float:
    """Return the microseconds of one run, as the mean of `num_repeats` runs."""
    _wait_for(out.device)
    start = time.perf_counter()
    for _ in range(num_repeats):
        step.add(0, out, rows)
    _wait_for(out.device)
    return (time.perf_counter() - start) / num_repeats * 1e6


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _segments(mix: Mix, num_inputs: int, columns: Sequence[int], like: Tensor) -> list[Segment]:
    edges = [sum(columns[:number]) for number in range(len(columns) + 1)]
    places = {
        str(number): AdapterPlacement(0, IndexRange(begin, end), IndexRange(0, num_inputs), IndexRange(0, end - begin))
        for number, (begin, end) in enumerate(pairwise(edges))
    }
    layouts, segments, stop = LayoutCache(places), [], 0
    for number, length in enumerate(mix.lengths):
        rank = mix.ranks[number % len(mix.ranks)]
        layout = layouts.of(
            {name: LoraShape(rank, num_inputs, place.columns.size, 1.0) for name, place in places.items()}
        )
        flat = torch.randn(layout.num_values, device=like.device).mul_(0.01).to(like.dtype)
        segments.append(Segment(stop, stop + length, PlacedAdapter(layout, flat)))
        stop += length
    return segments


def _print_table(console: Console, figures: Sequence[ProductFigure]) -> None:
    from rich.table import Table

    table = Table(title="What adapters take at one site: 4096 features to 4096 + 1024 + 1024", caption="microseconds")
    table.add_column("", no_wrap=True)
    for name in figures[0].microseconds:
        table.add_column(name, justify="right")
    for figure in figures:
        table.add_row(figure.name, *(f"{taken:.1f}" for taken in figure.microseconds.values()))
    console.print(table)
