"""Tests that block formats decode to the same numbers as in the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.cpu_kernels.ggml import TYPES, check_blocks, dequantize, quantize, split_blocks
from bridle.errors import InvalidRequest
from tests.conftest import examples
from tests.cpu_kernels.blocks import random_blocks


@pytest.mark.parametrize("name", TYPES)
@given(num_outputs=st.integers(1, 5), num_blocks=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=examples(20), deadline=None)
def test_numbers_are_those_of_gguf(name: str, num_outputs: int, num_blocks: int, seed: int) -> None:
    kind = TYPES[name]
    blocks = random_blocks(name, num_outputs, num_blocks * kind.inputs, seed)
    want = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    have = dequantize(kind, torch.from_numpy(blocks)).numpy()
    np.testing.assert_allclose(have, want, rtol=2e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_quantizing_gives_the_blocks_of_gguf(name: str) -> None:
    weight = np.random.default_rng(3).normal(size=(7, 96)).astype(np.float32)
    weight[2, 32:64] = 0.0
    have = quantize(TYPES[name], torch.from_numpy(weight))
    want = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(have.numpy(), want)


@pytest.mark.parametrize("name", TYPES)
def test_parts_are_in_bounds(name: str) -> None:
    kind = TYPES[name]
    split = split_blocks(kind, torch.from_numpy(random_blocks(name, 3, 2 * kind.inputs, 0)))
    assert split.integers.shape == (3, 2 * kind.inputs)
    assert int(split.integers.max()) < 1 << kind.bits
    assert (split.minimum is None) == (not kind.has_minimum)
    assert (split.offset is None) == (not kind.has_offset)


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((2, 48), (2, 51)),  # half a block
        ((2, 64), (2, 67)),  # a byte short
        ((3, 64), (2, 68)),
        ((0, 64), (0, 68)),
    ],
)
def test_blocks_of_another_shape_are_refused(shape: tuple[int, int], blocks: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match="Q8_0"):
        check_blocks(TYPES["Q8_0"], torch.zeros(blocks, dtype=torch.uint8), shape)
