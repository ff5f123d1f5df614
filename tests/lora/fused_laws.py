"""Laws of the fused kernels, in Triton's interpreter. `test_fused.py` runs this file in a process of its own, where
TRITON_INTERPRET is set before anything imports Triton."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridle.errors import InternalError
from bridle.lora.choice import TriedProducts, create_products
from bridle.lora.fused import FusedProducts, is_interpreted
from bridle.lora.layout import Layouts
from bridle.lora.product import AdapterStep, Segment
from tests.lora.fused_kit import Sides, check_any_step, check_step, make_adapter, places_of
from tests.model.test_adapters import Loaded, all_logits

assert is_interpreted(), "run this with TRITON_INTERPRET=1"

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# What was not written is not a number, so that nobody can rely on it.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True


@given(st.integers(0, 1 << 30), st.sampled_from(DTYPES))
def test_any_step_gives_what_torch_gives(seed: int, dtype: torch.dtype) -> None:
    check_any_step(FusedProducts(CPU), seed, torch.empty(0, dtype=dtype), max_tokens=150)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_divided_where_a_step_has_few_tiles(dtype: torch.dtype) -> None:
    """One tile over many inputs, and the same as one of many."""
    sites = [Sides(4000, (40, 16))]
    products, layouts = FusedProducts(CPU), Layouts(places_of(sites))
    products._enough = 8
    like = torch.empty(0, dtype=dtype)
    adapters = [make_adapter(layouts, places_of(sites), {"0.0": 16, "0.1": 8}, like, seed) for seed in range(8)]
    for count in (1, 8):
        segments = [Segment(3 * number, 3 * number + 2, adapter) for number, adapter in enumerate(adapters[:count])]
        check_step(products, segments, 3 * count, sites)


def test_the_largest_rank_and_the_most_parts() -> None:
    sites = [Sides(24, (8,) * 9)]
    places, like = places_of(sites), torch.empty(0)
    large = make_adapter(Layouts(places), places, {"0.0": 512, "0.8": 512}, like, 0)
    small = make_adapter(Layouts(places), places, dict.fromkeys(places, 1), like, 1)
    check_step(FusedProducts(CPU), [Segment(0, 2, large), Segment(2, 20, small)], 20, sites)


def test_other_types_than_the_adapters_are_refused() -> None:
    sites = [Sides(8, (8,))]
    places = places_of(sites)
    adapter = make_adapter(Layouts(places), places, {"0.0": 8}, torch.empty(0), 0)
    step = AdapterStep([Segment(0, 1, adapter)], 1, FusedProducts(CPU))
    with pytest.raises(InternalError, match=r"torch.float32 are added to torch.float16"):
        step.add(0, torch.zeros(1, 8, dtype=torch.float16), torch.zeros(1, 8, dtype=torch.float16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_trial_lets_the_kernels_pass(dtype: torch.dtype) -> None:
    sites = [Sides(272, (40, 8, 16)), Sides(20, (7,))]
    places = places_of(sites)
    adapter = make_adapter(Layouts(places), places, dict.fromkeys(places, 9), torch.empty(0, dtype=dtype), 0)
    products = create_products("fused", CPU, dtype)
    assert isinstance(products, TriedProducts)
    products.prepare(adapter)
    check_step(products, [Segment(1, 3, adapter)], 4, sites)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_says_what_peft_says(family: str, tmp_path: Path) -> None:
    loaded = Loaded(family, tmp_path, num_blocks=64, adapter_kernel="fused")
    try:
        loaded.place_all()
        prompts = [[3 + (7 * number + place) % 50 for place in range(5 + number)] for number in range(5)]
        adapters = ["0", "1", "1", None, "2"]
        for prompt, adapter, have in zip(
            prompts, adapters, all_logits(loaded.executor, prompts, adapters), strict=True
        ):
            torch.testing.assert_close(have, loaded.oracle.logits(prompt, adapter), rtol=1e-3, atol=1e-3)
    finally:
        loaded.close()
