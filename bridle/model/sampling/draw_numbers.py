"""Arithmetic of the sampling kernels: weights, random numbers, and the logits of a row after its bias, mask and
penalties. Importing this module needs Triton. Pointers are documented in `draw_kernels`.

Results have the same bits on any GPU. Multiplication and addition are fused only in explicit `fma` calls, divisions are
correctly rounded, and sums are of integers. The exponential function has the same operations as in the C kernels, so
both give equal weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Integers of a row: logits row, slots of its mask, of its counts and of both biases, top-k, slot among cut rows.
INTS = tl.constexpr(8)
# Floats of a row: temperature (0: greedy), floor, penalties for repetition, presence and frequency.
FLOATS = tl.constexpr(5)
# Words of a history's span: first new word, prompt tokens, tokens, tokens on the device and their position. Words of a
# bias's span: first word, tokens.
SPAN = tl.constexpr(5)
# The bit that is set in the count of a token that the prompt contains.
PROMPT = tl.constexpr(1 << 30)
UNIT = tl.constexpr(17179869184.0)
LEAST = tl.constexpr(-24.0)  # smaller values have weight 0
LEAST_BITS = tl.constexpr(0x41C00000)  # the bits of its absolute value
NEVER = tl.constexpr(float("-inf"))
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)


# -- numbers -----------------------------------------------------------------------------------------------------


@triton.jit
def weigh(shifted: tl.tensor) -> tl.tensor:
    """Return the int64 weights of logits from which the row's largest logit was subtracted."""
    x = tl.maximum(shifted, LEAST)
    n = (x * 1.44269504 + 12582912.0) - 12582912.0  # to the nearest whole number
    r = tl.fma(n, -0.693359375, x)
    r = tl.fma(n, 2.12194440e-4, r)
    p = tl.fma(1.9875691500e-4, r, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    p = tl.fma(p * r, r, r + 1.0)
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return (p * power * UNIT).to(tl.int64)


@triton.jit
def _mix(word: tl.tensor) -> tl.tensor:
    word = (word ^ (word >> 30)) * FIRST_FACTOR
    word = (word ^ (word >> 27)) * SECOND_FACTOR
    return word ^ (word >> 31)


@triton.jit
def uniform_of(key: tl.tensor, draw: tl.tensor) -> tl.tensor:
    """Return the same random number as `bridle.model.sampling.uniform`, float64 in [0, 1)."""
    golden = tl.full((), GOLDEN, tl.uint64)
    state = _mix(key.to(tl.uint64, bitcast=True) + golden) + (draw.to(tl.uint64, bitcast=True) + 1) * golden
    return (_mix(state) >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


# -- rows --------------------------------------------------------------------------------------------------------


@triton.jit
def steered(
    logits: tl.tensor,
    ints: tl.tensor,  # of this row
    masks: tl.tensor,
    biases: tl.tensor,
    column: tl.tensor,
    is_column: tl.tensor,
    vocab: tl.tensor,
    mask_words: tl.tensor,
) -> tl.tensor:
    """Return logits after bias and mask; -inf beyond the vocabulary."""
    x = tl.load(logits + tl.load(ints).to(tl.int64) * vocab + column, is_column, NEVER).to(tl.float32)
    given, own = tl.load(ints + 3), tl.load(ints + 4)
    x += tl.load(biases + given.to(tl.int64) * vocab + column, is_column & (given >= 0), 0.0)
    x += tl.load(biases + own.to(tl.int64) * vocab + column, is_column & (own >= 0), 0.0)
    slot = tl.load(ints + 1)
    word = tl.load(masks + slot.to(tl.int64) * mask_words + column // 32, is_column & (slot >= 0), -1)
    return tl.where(((word >> (column % 32)) & 1) != 0, x, NEVER)


@triton.jit
def penalized(
    logits: tl.tensor,
    ints: tl.tensor,  # of this row, like `floats`
    floats: tl.tensor,
    masks: tl.tensor,
    counts: tl.tensor,
    biases: tl.tensor,
    column: tl.tensor,
    is_column: tl.tensor,
    vocab: tl.tensor,
    mask_words: tl.tensor,
) -> tl.tensor:
    """Return the logits after bias, mask and penalties, before the temperature."""
    x = steered(logits, ints, masks, biases, column, is_column, vocab, mask_words)
    slot = tl.load(ints + 2)
    if slot >= 0:
        count = tl.load(counts + slot.to(tl.int64) * vocab + column, is_column, 0)
        repetition = tl.load(floats + 2)
        x = tl.where(count != 0, tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition), x)
        own = count & (PROMPT - 1)
        x = x - (own.to(tl.float32) * tl.load(floats + 4) + tl.where(own > 0, tl.load(floats + 3), 0.0))
    return x


@triton.jit
def best_of(peaks: tl.tensor, row: tl.tensor, num_parts: tl.tensor, block_parts: tl.constexpr) -> tl.tensor:
    """Return the largest logit of a row; NaN if the row contains NaN."""
    number = tl.arange(0, block_parts)
    peak = tl.load(peaks + row * num_parts + number, number < num_parts, NEVER)
    is_none = tl.max((peak != peak).to(tl.int32), 0) > 0
    return tl.where(is_none, float("nan"), tl.max(tl.where(peak == peak, peak, NEVER), 0))


@triton.jit
def edge_of(ints: tl.tensor, edges: tl.tensor, rooms: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the smallest logit of a row that top-k and top-p keep, and how many logits equal to it are kept."""
    slot = tl.load(ints + 6)
    return tl.load(edges + slot, slot >= 0, NEVER), tl.load(rooms + slot, slot >= 0, 0)
