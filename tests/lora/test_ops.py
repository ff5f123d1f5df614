"""Tests that both ways to multiply by many adapters at once give the product of each row with its own adapter."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bridle.errors import InternalError
from bridle.lora.layout import AdapterPlacement, IndexRange, LayoutCache
from bridle.lora.ops import AdapterKernel, AdapterStep, Segment
from bridle.lora.peft_config import LoraShape
from bridle.lora.torch_ops import MAX_SHORT, SingleProduct, StackedProduct, TorchKernel
from bridle.lora.weights import PlacedAdapter

# Two sites: one of three parts side by side, one of its own.
PLACES = {
    "q": AdapterPlacement(0, IndexRange(0, 12), IndexRange(0, 8), IndexRange(0, 12)),
    "k": AdapterPlacement(0, IndexRange(12, 16), IndexRange(0, 8), IndexRange(0, 4)),
    "v": AdapterPlacement(0, IndexRange(16, 20), IndexRange(0, 8), IndexRange(0, 4)),
    "down": AdapterPlacement(1, IndexRange(0, 8), IndexRange(0, 20), IndexRange(0, 8)),
}
WIDTHS = {0: (8, 20), 1: (20, 8)}


def make_adapter(layouts: LayoutCache, names: tuple[str, ...], rank: int, seed: int) -> PlacedAdapter:
    shapes = {name: LoraShape(rank, PLACES[name].inputs.size, PLACES[name].columns.size, 1.0) for name in names}
    layout = layouts.of(shapes)
    return PlacedAdapter(layout, torch.randn(layout.num_values, generator=torch.Generator().manual_seed(seed)))


def naive(segments: list[Segment], site: int, rows: Tensor) -> Tensor:
    """Return the adapters' results of one group of layers, computed row by row and layer by layer."""
    out = torch.zeros(rows.shape[0], WIDTHS[site][1])
    for segment in segments:
        weights = segment.adapter.sites.get(site)
        if weights is None:
            continue
        for number in range(segment.start, segment.stop):
            hidden = rows[number] @ weights.first
            for part, second in zip(weights.block.parts, weights.seconds, strict=True):
                out[number, part.columns.begin : part.columns.end] += hidden[slice(*part.ranks)] @ second
    return out


def random_segments(random: Random, adapters: list[PlacedAdapter]) -> tuple[list[Segment], int]:
    """Return random segments with gaps between them, some of them long, and the number of rows."""
    position, segments = 0, []
    for adapter in random.sample(adapters, random.randint(1, len(adapters))):
        position += random.choice([0, 0, 0, 1, 5])
        length = random.choice([1, 1, 1, 2, 3, MAX_SHORT, MAX_SHORT + 1, 40])
        segments.append(Segment(position, position + length, adapter))
        position += length
    return segments, position + random.choice([0, 3])


def check(segments: list[Segment], num_tokens: int, kernel: AdapterKernel) -> None:
    step = AdapterStep(segments, num_tokens, kernel)
    generator = torch.Generator().manual_seed(num_tokens)
    for site in step.by_site:
        rows = torch.randn(num_tokens, WIDTHS[site][0], generator=generator)
        base = torch.randn(num_tokens, WIDTHS[site][1], generator=generator)
        out = base.clone()
        step.add(site, out.unsqueeze(0), rows.unsqueeze(0))
        want = base + naive(segments, site, rows)
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
        untouched = torch.ones(num_tokens, dtype=torch.bool)
        for segment in segments:
            untouched[segment.start : segment.stop] = False
        assert torch.equal(out[untouched], base[untouched]), "rows without an adapter must not change by a bit"


@given(st.integers(0, 1 << 30))
def test_any_mixture_gives_what_each_row_has(seed: int) -> None:
    """Adapters have several layouts and ranks, and the kernel keeps its stacked weights over four steps."""
    random, layouts, kernel = Random(seed), LayoutCache(PLACES), TorchKernel()
    kinds = [("q", "v"), ("q", "v"), ("q", "k", "v", "down"), ("down",)]
    adapters = [
        make_adapter(layouts, random.choice(kinds), random.choice([1, 4, 8, 9]), number) for number in range(12)
    ]
    for _ in range(4):
        check(*random_segments(random, adapters), kernel)


def test_many_short_segments_are_one_product() -> None:
    layouts, kernel = LayoutCache(PLACES), TorchKernel()
    adapters = [make_adapter(layouts, ("q", "v"), 4, number) for number in range(8)]
    segments = [Segment(number, number + 1, adapter) for number, adapter in enumerate(adapters)]
    step = AdapterStep(segments, 8, kernel)
    assert [type(product) for product in step.by_site[0]] == [StackedProduct]
    check(segments, 8, kernel)
    # The next step has two others, and fewer of them: only those are copied.
    stack = TorchKernel()._stack_of(adapters[0])
    before = stack.load_rows(adapters)
    fresh = [make_adapter(layouts, ("q", "v"), 4, 20 + number) for number in range(2)]
    after = stack.load_rows([*adapters[:3], *fresh])
    assert after[:3] == before[:3]
    assert sorted(after) == list(range(5))


@pytest.mark.parametrize(
    ("lengths", "num_stacked"),
    [([1] * 8 + [16], 8), ([2] * 2 + [4], 3), ([1] * 8 + [MAX_SHORT + 1], 8), ([4] * 8 + [5], 9), ([2] * 40 + [3], 40)],
)
def test_a_prompt_makes_decodes_no_longer_where_that_costs_more(lengths: list[int], num_stacked: int) -> None:
    layouts, kernel = LayoutCache(PLACES), TorchKernel()
    segments, end = [], 0
    for number, length in enumerate(lengths):
        segments.append(Segment(end, end + length, make_adapter(layouts, ("q", "v"), 4, number)))
        end += length
    stacked, *single = AdapterStep(segments, end, kernel).by_site[0]
    assert isinstance(stacked, StackedProduct)
    assert stacked._num == num_stacked
    assert len(single) == (num_stacked < len(lengths))
    check(segments, end, kernel)


def test_what_is_too_large_for_a_stack_is_multiplied_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts, kernel = LayoutCache(PLACES), TorchKernel()
    adapters = [make_adapter(layouts, ("q", "k", "v", "down"), 4, number) for number in range(5)]
    segments = [Segment(2 * number, 2 * number + 1 + number % 2, adapter) for number, adapter in enumerate(adapters)]
    stacked = kernel.products(segments)
    monkeypatch.setattr("bridle.lora.torch_ops.MAX_STACK_BYTES", 5 * adapters[0].flat.nbytes - 1)
    alone = kernel.products(segments)
    assert [type(product) for product in (*stacked, *alone)] == [StackedProduct, SingleProduct]
    check(segments, 10, kernel)


def test_ranks_that_differ_a_little_share_a_layout() -> None:
    layouts = LayoutCache(PLACES)
    one, other = make_adapter(layouts, ("q",), 3, 0), make_adapter(layouts, ("q",), 8, 1)
    assert one.layout is other.layout
    assert make_adapter(layouts, ("q",), 9, 0).layout is not one.layout


def test_a_layer_that_sees_other_rows_than_the_step_is_an_error() -> None:
    layouts = LayoutCache(PLACES)
    step = AdapterStep([Segment(0, 1, make_adapter(layouts, ("q",), 4, 0))], 3, TorchKernel())
    with pytest.raises(InternalError, match="got 2 rows; the step has 3 tokens"):
        step.add(0, torch.zeros(2, 20), torch.zeros(2, 8))
