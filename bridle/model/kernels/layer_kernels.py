"""The Triton kernels for the operations of a layer between its matrix products and attention; `bridle.model.fused_step`
uses them. Importing this module needs Triton.

Rows [T, n] are contiguous. Kernels compute in float32, and round a value once, when they write it. One program computes
a row, or a part of a row, from that row alone, so its result has the same bits in any batch. No kernel reads values
that it writes, so the order of threads does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _inverse_rms(squares: tl.tensor, size: tl.constexpr, eps: tl.tensor) -> tl.tensor:
    """Return the inverse of the root mean square of `size` values, given the sum of their squares."""
    return 1.0 / tl.sqrt(squares / size + eps)


@triton.jit
def _store_rounded(
    row: tl.tensor,  # [block], as it would be stored
    to: tl.tensor,
    scale: tl.tensor,
    is_number: tl.tensor,
) -> None:
    """Store a row in float8, and its scale. The row's largest magnitude becomes 448, the largest value of float8."""
    top = tl.maximum(tl.max(tl.abs(row), 0) / 448.0, 1e-12)
    tl.store(scale, top)
    tl.store(to, (row / top).to(to.dtype.element_ty), is_number)


@triton.jit
def add_and_norm(
    rows: tl.tensor,  # [T, n]
    added: tl.tensor,  # [T, n]
    added_weight: tl.tensor,  # [n]
    weight: tl.tensor,  # [n]
    out: tl.tensor,  # [T, n] rows + share * norm(added)
    normed: tl.tensor,  # [T, n] norm(out), in float8 if it is rounded
    scales: tl.tensor,  # [T] of what is rounded
    share: tl.tensor,
    added_eps: tl.tensor,
    eps: tl.tensor,
    size: tl.constexpr,
    block: tl.constexpr,
    is_added: tl.constexpr,
    has_added_norm: tl.constexpr,
    has_norm: tl.constexpr,
    is_rounded: tl.constexpr,
) -> None:
    """Add the output of attention or MLP to the hidden states, and compute the norm that comes next. Program axis:
    tokens."""
    number = tl.arange(0, block)
    is_number = number < size
    at = tl.program_id(0).to(tl.int64) * size + number
    row = tl.load(rows + at, is_number, 0.0).to(tl.float32)
    if is_added:
        more = tl.load(added + at, is_number, 0.0).to(tl.float32)
        if has_added_norm:
            more *= _inverse_rms(tl.sum(more * more, 0), size, added_eps)
            more *= tl.load(added_weight + number, is_number, 0.0).to(tl.float32)
        rounded = (row + more * share).to(out.dtype.element_ty)
        tl.store(out + at, rounded, is_number)
        row = rounded.to(tl.float32)
    if has_norm:
        row *= _inverse_rms(tl.sum(row * row, 0), size, eps)
        row *= tl.load(weight + number, is_number, 0.0).to(tl.float32)
        if not is_rounded:
            tl.store(normed + at, row.to(normed.dtype.element_ty), is_number)
    if is_rounded:
        row = row.to(rows.dtype.element_ty).to(tl.float32)
        _store_rounded(row, normed + at, scales + tl.program_id(0), is_number)


@triton.jit
def _squares(
    heads: tl.tensor,  # [heads, D] of one token, from its first query or key head on
    count: tl.constexpr,
    dim: tl.constexpr,
    block_heads: tl.constexpr,
    block_dim: tl.constexpr,
) -> tl.tensor:
    """Return the sum of squares over `count` heads."""
    number = tl.arange(0, block_dim)
    sums = tl.zeros((block_heads, block_dim), tl.float32)
    for first in range(0, count, block_heads):
        head = first + tl.arange(0, block_heads)
        at = heads + head[:, None] * dim + number[None, :]
        part = tl.load(at, (head < count)[:, None] & (number < dim)[None, :], 0.0).to(tl.float32)
        sums += part * part
    return tl.sum(tl.sum(sums, 1), 0)


@triton.jit
def turn_and_store(
    mixed: tl.tensor,  # [T, Hq + 2 Hkv, D]
    weight: tl.tensor,  # [Hq + Hkv, D]
    angles: tl.tensor,  # [P, 2, D/2] cosines and sines, rows `stride` apart
    places: tl.tensor,  # [T] of each token's angles
    num_places: tl.tensor,
    slots: tl.tensor,  # [T]
    query: tl.tensor,  # [T, Hq, D]
    keys: tl.tensor,  # [slots, Hkv, D]
    values: tl.tensor,  # [slots, Hkv, D]
    eps: tl.tensor,
    stride: tl.constexpr,
    num_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    block_heads: tl.constexpr,
    block_dim: tl.constexpr,
    has_norm: tl.constexpr,
    is_norm_of_all: tl.constexpr,
    is_rotated: tl.constexpr,
) -> None:
    """Normalize and rotate query and key heads; write keys and values to their cache slot. Program axes: tokens, groups
    of heads."""
    token = tl.program_id(0).to(tl.int64)
    mine = mixed + token * ((num_heads + 2 * kv_heads) * dim)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    number = tl.arange(0, block_dim)
    is_turned = (head < num_heads + kv_heads)[:, None] & (number < dim)[None, :]
    is_value = (head >= num_heads + kv_heads) & (head < num_heads + 2 * kv_heads)
    is_number = is_turned | (is_value[:, None] & (number < dim)[None, :])
    at = head[:, None] * dim + number[None, :]
    loaded = tl.load(mine + at, is_number, 0.0)
    wide = loaded.to(tl.float32)
    inverse = tl.full((block_heads,), 1.0, tl.float32)
    if is_norm_of_all:
        of_queries = _squares(mine, num_heads, dim, block_heads, block_dim)
        of_keys = _squares(mine + num_heads * dim, kv_heads, dim, block_heads, block_dim)
        of_queries = _inverse_rms(of_queries, num_heads * dim, eps)
        inverse = tl.where(head < num_heads, of_queries, _inverse_rms(of_keys, kv_heads * dim, eps))
    elif has_norm:
        inverse = _inverse_rms(tl.sum(wide * wide, 1), dim, eps)
    turned = wide * inverse[:, None]
    if has_norm:
        turned *= tl.load(weight + at, is_turned, 0.0).to(tl.float32)
    if is_rotated:
        half: tl.constexpr = dim // 2
        other = head[:, None] * dim + ((number + half) % dim)[None, :]
        partner = tl.load(mine + other, is_turned, 0.0).to(tl.float32) * inverse[:, None]
        if has_norm:
            partner *= tl.load(weight + other, is_turned, 0.0).to(tl.float32)
        place = tl.load(places + token).to(tl.int64)
        place = tl.minimum(tl.maximum(place, 0), num_places - 1)  # clamped for tokens whose result is unused
        angle = angles + place * stride + number % half
        sin = tl.load(angle + half, number < dim, 0.0).to(tl.float32)
        turned *= tl.load(angle, number < dim, 0.0).to(tl.float32)[None, :]
        turned += partner * tl.where(number < half, -sin, sin)[None, :]
    tl.store(
        query + token * (num_heads * dim) + at,
        turned.to(query.dtype.element_ty),
        is_turned & (head < num_heads)[:, None],
    )
    slot = tl.load(slots + token) * (kv_heads * dim)
    to_key = keys + slot + at - num_heads * dim
    tl.store(to_key, turned.to(keys.dtype.element_ty), is_turned & (head >= num_heads)[:, None])
    to_value = values + slot + at - (num_heads + kv_heads) * dim
    tl.store(to_value, loaded.to(values.dtype.element_ty), is_value[:, None] & (number < dim)[None, :])


@triton.jit
def _gated(at: tl.tensor, is_number: tl.tensor, size: tl.constexpr, is_gelu: tl.constexpr) -> tl.tensor:
    opened = tl.load(at, is_number, 0.0).to(tl.float32)
    through = tl.load(at + size, is_number, 0.0).to(tl.float32)
    inner = opened
    if is_gelu:  # 0.5 + 0.5 tanh(z) is the logistic function of 2 z; 1.5957... is 2 sqrt(2 / pi)
        inner = 1.5957691216057308 * (opened + 0.044715 * opened * opened * opened)
    small = tl.exp(-tl.abs(inner))  # avoids large numbers
    share = tl.where(inner < 0, small, 1.0) / (1.0 + small)
    return opened * share * through


@triton.jit
def gate(
    mixed: tl.tensor,  # [T, 2 n]: gates, then what they let through
    out: tl.tensor,  # [T, n]
    size: tl.constexpr,
    block: tl.constexpr,
    is_gelu: tl.constexpr,
) -> None:
    """Apply the activation (SiLU or tanh GELU) to the first half of a row, and multiply by the second half. Program
    axes: tokens, blocks of columns."""
    token = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * block + tl.arange(0, block)
    is_number = number < size
    row = _gated(mixed + token * (2 * size) + number, is_number, size, is_gelu)
    tl.store(out + token * size + number, row.to(out.dtype.element_ty), is_number)


@triton.jit
def gate_rounded(
    mixed: tl.tensor,  # [T, 2 n]
    out: tl.tensor,  # [T, n] in float8
    scales: tl.tensor,  # [T]
    size: tl.constexpr,
    block: tl.constexpr,
    is_gelu: tl.constexpr,
) -> None:
    """Compute `gate` with results rounded to float8. Program axis: tokens. A row is computed twice, because its scale
    depends on the whole row."""
    token = tl.program_id(0).to(tl.int64)
    mine = mixed + token * (2 * size)
    largest = tl.zeros((block,), tl.float32)
    for first in range(0, size, block):
        number = first + tl.arange(0, block)
        row = _gated(mine + number, number < size, size, is_gelu).to(mixed.dtype.element_ty).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(row))
    top = tl.maximum(tl.max(largest, 0) / 448.0, 1e-12)
    tl.store(scales + token, top)
    for first in range(0, size, block):
        number = first + tl.arange(0, block)
        row = _gated(mine + number, number < size, size, is_gelu).to(mixed.dtype.element_ty).to(tl.float32)
        tl.store(out + token * size + number, (row / top).to(out.dtype.element_ty), number < size)
