"""Tests of properties of the fused kernels in Triton's interpreter.

`test_fused.py` runs this file in a process of its own, where TRITON_INTERPRET is set before anything imports Triton."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder as Builder

from bridle.errors import InternalError
from bridle.lora.adapter_kernel import TOLERANCES, TriedKernel, create_adapter_kernel
from bridle.lora.fused import FusedKernel, FusedProduct, TiledProduct, is_interpreted
from bridle.lora.layout import AdapterPlacement, LayoutCache, make_layout
from bridle.lora.ops import AdapterStep, Segment
from bridle.lora.peft_config import LoraShape
from bridle.lora.torch_ops import TorchKernel
from bridle.model.adapter_tiles import MOST_RANKS, AdapterTiles
from tests.lora.fused_kit import (
    Sides,
    check_any_step,
    check_step,
    make_adapter,
    places_of,
    random_adapters,
    random_segments,
    random_sides,
)
from tests.lora.fused_model import check_model
from tests.model.addresses import check_owned

assert is_interpreted(), "run this with TRITON_INTERPRET=1"

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# What was not written is not a number, so that nobody can rely on it.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True


@settings(max_examples=30)
@given(st.integers(0, 1 << 30), st.sampled_from(DTYPES))
def test_any_step_gives_what_torch_gives(seed: int, dtype: torch.dtype) -> None:
    check_any_step(FusedKernel(CPU), seed, torch.empty(0, dtype=dtype), max_tokens=150)


@contextmanager
def watched() -> Iterator[tuple[list[tuple[np.ndarray, int]], list[Tensor]]]:
    """Record the addresses that kernels read and write, with the element size, and the sums passed from one kernel to
    the next."""
    touched: list[tuple[np.ndarray, int]] = []
    hidden: list[Tensor] = []

    def noting(access: Any, mask_index: int) -> Any:
        def noted(self: Any, ptrs: Any, *rest: Any) -> Any:
            mask = np.broadcast_to(rest[mask_index].data, ptrs.data.shape)
            touched.append((ptrs.data[mask], ptrs.get_element_ty().primitive_bitwidth // 8))
            return access(self, ptrs, *rest)

        return noted

    def shrink(self: TiledProduct, *rest: Any) -> Tensor:
        hidden.append(whole_shrink(self, *rest))
        return hidden[-1]

    whole_shrink = TiledProduct.shrink
    with (
        patch.object(Builder, "create_masked_load", noting(Builder.create_masked_load, 0)),
        patch.object(Builder, "create_masked_store", noting(Builder.create_masked_store, 1)),
        patch.object(TiledProduct, "shrink", shrink),
    ):
        yield touched, hidden


@settings(max_examples=30)
@given(st.integers(0, 1 << 30), st.sampled_from(DTYPES))
def test_no_program_leaves_its_tensors(seed: int, dtype: torch.dtype) -> None:
    """On a GPU, an address outside of the tensors would belong to other data or crash the process."""
    random, like = Random(seed), torch.empty(0, dtype=dtype)
    sites = random_sides(random)
    segments, num_tokens = random_segments(random, random_adapters(random, sites, like, 6), 150)
    (product,) = FusedKernel(CPU).products(segments)
    assert isinstance(product, FusedProduct)
    held = [product.tiles, *(table.values for table in product.held[1])]
    held += [segment.adapter.flat for segment in segments]
    for site in product.sites:
        rows = torch.zeros(num_tokens, sites[site].num_inputs, dtype=dtype)
        out = torch.zeros(num_tokens, sites[site].num_outputs, dtype=dtype)
        with watched() as (touched, hidden):
            product.add(site, out, rows)
        assert touched and hidden
        spans = sorted({(one.data_ptr(), one.data_ptr() + one.nbytes) for one in (rows, out, *hidden, *held)})
        begins, ends = (np.array(edges, dtype=np.uint64) for edges in zip(*spans, strict=True))
        for addresses, size in touched:
            flat = addresses.ravel().astype(np.uint64)
            owners = np.searchsorted(begins, flat, "right") - 1
            assert (owners >= 0).all() and (flat + np.uint64(size) <= ends[owners]).all()


@settings(max_examples=15)
@given(st.integers(0, 1 << 30), st.sampled_from(DTYPES))
def test_tiles_at_a_fixed_place_give_what_torch_gives(seed: int, dtype: torch.dtype) -> None:
    """Steps replay launches with tiles at fixed addresses and with changing adapters; no kernel program leaves its
    tensors."""
    random, like = Random(seed), torch.empty(0, dtype=dtype)
    sites = random_sides(random)
    places = places_of(sites)
    kernel = TriedKernel(FusedKernel(CPU), CPU, dtype, None)
    tiles = AdapterTiles(kernel, lambda rank: make_layout(_of_all(rank, places), places), dtype, 24)
    adapters = random_adapters(random, sites, like, 6)
    step = tiles.step(24, 24)
    for _ in range(3):
        segments, _ = random_segments(random, adapters, 24)
        assert tiles.takes(segments, 24) is all(_ranks(segment) <= MOST_RANKS for segment in segments)
        segments = [segment for segment in segments if _ranks(segment) <= MOST_RANKS]
        assert kernel.fused is not None
        held = [tiles._values, tiles._no_sites, *(table.values for table in kernel.fused.tables(segments))]
        held += [segment.adapter.flat for segment in segments]
        tiles.write(24, segments)
        plain = AdapterStep(segments, 24, TorchKernel()) if segments else None
        for site, sides in enumerate(sites):
            rows = torch.randn(24, sides.num_inputs).to(dtype)
            base = torch.randn(24, sides.num_outputs).to(dtype)
            have, want = base.clone(), base.clone()
            with watched() as (touched, hidden):
                step.add(site, have, rows)
            check_owned(touched, [rows, have, *hidden, *held])
            if plain is not None and site in plain.by_site:
                plain.add(site, want, rows)
            limit = TOLERANCES[dtype] * max(1.0, float(want.abs().max()))
            assert float((have.float() - want.float()).abs().max()) <= limit
            free = [n for n in range(24) if not any(each.start <= n < each.stop for each in segments)]
            assert torch.equal(have[free], base[free])


def _of_all(rank: int, places: dict[str, AdapterPlacement]) -> dict[str, LoraShape]:
    return {name: LoraShape(rank, place.inputs.size, place.outputs.size, 1.0) for name, place in places.items()}


def _ranks(segment: Segment) -> int:
    return max(part.ranks.size for block in segment.adapter.layout.blocks.values() for part in block.parts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_divided_where_a_step_has_few_tiles(dtype: torch.dtype) -> None:
    """A step with one tile splits the sum over inputs among programs, and gives the same result as a step with many
    tiles."""
    sites = [Sides(2100, (40, 16))]
    kernel, layouts = FusedKernel(CPU), LayoutCache(places_of(sites))
    kernel.machine.enough = 8
    like = torch.empty(0, dtype=dtype)
    adapters = [make_adapter(layouts, places_of(sites), {"0.0": 16, "0.1": 8}, like, seed) for seed in range(5)]
    for count in (1, 5):
        segments = [Segment(3 * number, 3 * number + 2, adapter) for number, adapter in enumerate(adapters[:count])]
        check_step(kernel, segments, 3 * count, sites)


def test_the_largest_rank_and_the_most_parts() -> None:
    sites = [Sides(24, (8,) * 9)]
    places, like = places_of(sites), torch.empty(0)
    large = make_adapter(LayoutCache(places), places, {"0.0": 512, "0.8": 512}, like, 0)
    small = make_adapter(LayoutCache(places), places, dict.fromkeys(places, 1), like, 1)
    check_step(FusedKernel(CPU), [Segment(0, 2, large), Segment(2, 20, small)], 20, sites)


def test_other_types_than_the_adapters_are_refused() -> None:
    sites = [Sides(8, (8,))]
    places = places_of(sites)
    adapter = make_adapter(LayoutCache(places), places, {"0.0": 8}, torch.empty(0), 0)
    step = AdapterStep([Segment(0, 1, adapter)], 1, FusedKernel(CPU))
    with pytest.raises(InternalError, match=r"torch.float32 are added to torch.float16"):
        step.add(0, torch.zeros(1, 8, dtype=torch.float16), torch.zeros(1, 8, dtype=torch.float16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_trial_lets_the_kernels_pass(dtype: torch.dtype) -> None:
    sites = [Sides(272, (40, 8, 16)), Sides(20, (7,))]
    places = places_of(sites)
    adapter = make_adapter(LayoutCache(places), places, dict.fromkeys(places, 9), torch.empty(0, dtype=dtype), 0)
    kernel = create_adapter_kernel("fused", CPU, dtype)
    assert isinstance(kernel, TriedKernel)
    kernel.prepare(adapter)
    check_step(kernel, [Segment(1, 3, adapter)], 4, sites)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_says_what_peft_says(family: str, tmp_path: Path) -> None:
    check_model(family, tmp_path, adapter_kernel="fused")
