"""Tests that quantized blocks decode to the same numbers as in the `gguf` package, and are as close to the originals as
their bits allow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from bridle.errors import UnsupportedModel
from bridle.gguf.dequantize import RARE, decode_blocks, exact_q8_0
from bridle.gguf.format import TENSOR_TYPES, TYPES_BY_NAME
from bridle.gguf.quantize import encode_blocks

PLAIN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
K_TYPES = {"Q4_K": 15, "Q5_K": 31, "Q6_K": 63}


def _weights(seed: int, rows: int = 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(rows, 512, generator=generator) * torch.logspace(-4, 2, rows)[:, None]
    weights[3] = 0
    weights[4, :256] = 0
    weights[5] = weights[5].abs()
    weights[6] = -weights[6].abs()
    weights[7] = 1.5
    return weights


def test_sizes_of_blocks_are_those_of_ggml() -> None:
    for number, kind in TENSOR_TYPES.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (kind.values, kind.size), kind.name


@pytest.mark.parametrize("kind", [*PLAIN, *K_TYPES])
def test_numbers_are_those_of_the_package(kind: str) -> None:
    blocks = encode_blocks(kind, _weights(1))
    assert blocks.shape[1] == 512 // TYPES_BY_NAME[kind].values * TYPES_BY_NAME[kind].size
    want = dequantize(blocks.numpy(), GGMLQuantizationType[kind])
    assert np.array_equal(decode_blocks(kind, blocks).numpy(), want)


@pytest.mark.parametrize("kind", PLAIN[3:])
def test_plain_blocks_are_those_of_the_package(kind: str) -> None:
    weights = _weights(2)
    want = decode_blocks(kind, torch.from_numpy(quantize(weights.numpy(), GGMLQuantizationType[kind])))
    have = decode_blocks(kind, encode_blocks(kind, weights))
    step = weights.abs().amax(1, keepdim=True) / 100
    assert bool(((have - want).abs() <= step).all())  # halves may be rounded either way


@pytest.mark.parametrize("kind", K_TYPES)
def test_k_types_lose_no_more_than_their_levels(kind: str) -> None:
    """The test quantizes rows of any size and sign; the error is below that of evenly spaced levels over a block's
    range."""
    weights = _weights(3)
    have = decode_blocks(kind, encode_blocks(kind, weights))
    run = 16 if kind == "Q6_K" else 32
    runs, errors = weights.view(-1, run), (have - weights).view(-1, run)
    span = (runs.amax(1).clamp_min(0) - runs.amin(1).clamp_max(0)).clamp_min(1e-12)
    if kind == "Q6_K":
        span = 2 * runs.abs().amax(1).clamp_min(1e-12)
    worst = errors.square().mean(1).sqrt() / span
    assert float(worst.median()) <= 0.4 / K_TYPES[kind]
    assert bool((have[3] == 0).all())


def test_mxfp4_is_that_of_the_package_and_exact_in_8_bits() -> None:
    blocks = torch.from_numpy(quantize(_weights(4).numpy(), GGMLQuantizationType.MXFP4))
    want = torch.from_numpy(dequantize(blocks.numpy(), GGMLQuantizationType.MXFP4))
    assert torch.equal(decode_blocks("MXFP4", blocks), want)
    exact = exact_q8_0("MXFP4", blocks)
    assert exact is not None and torch.equal(decode_blocks("Q8_0", exact), want)
    far = blocks.clone()
    far[0, 0] = 255  # a scale that half precision has not
    assert exact_q8_0("MXFP4", far) is None and exact_q8_0("NVFP4", blocks) is None
    far[3, 0] = 255  # it scales nothing but zeros
    far[0] = blocks[0]
    assert exact_q8_0("MXFP4", far) is not None


def test_iq4_nl_is_exact_in_8_bits() -> None:
    parts = np.random.default_rng(5).integers(0, 256, (6, 4, 18), dtype=np.uint8)
    parts[..., :2] = np.float16(0.01).reshape(1).view(np.uint8)
    blocks = torch.from_numpy(parts.reshape(6, -1))
    want = torch.from_numpy(dequantize(blocks.numpy(), GGMLQuantizationType.IQ4_NL))
    assert torch.equal(decode_blocks("IQ4_NL", blocks), want)
    exact = exact_q8_0("IQ4_NL", blocks)
    assert exact is not None and torch.equal(decode_blocks("Q8_0", exact), want)


@pytest.mark.parametrize("kind", sorted(RARE))
def test_rare_types_are_decoded_by_the_package(kind: str) -> None:
    form = TYPES_BY_NAME[kind]
    blocks = torch.from_numpy(np.random.default_rng(0).integers(0, 100, (3, form.size), dtype=np.uint8))
    assert decode_blocks(kind, blocks).shape == (3, form.values)


def test_types_without_weights_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="type I32 holds no weights"):
        decode_blocks("I32", torch.zeros(1, 4, dtype=torch.uint8))
