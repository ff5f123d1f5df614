"""Attention in plain torch, for CPUs and as the fallback on any device. If the blocks of a sequence are contiguous, its
KV is read as a view of the pool, without a copy. The KV of a scattered sequence is gathered once per layer. The query
heads that share a key head become additional query rows, so keys are never repeated. Each sequence has its own call, so
its result does not depend on other sequences. For 16 to 64 sequences of 128 to 1,024 tokens, separate calls were faster
than padding or separate matrix products (see docs/models.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bridle.model.batch_inputs import PackedRow, PackedStep
from bridle.model.forward_context import AttentionOptions
from bridle.model.h2d_copies import upload_list
from bridle.model.kv_cache import LayerCache

#: Rows of up to this number of tokens are folded: 1.4 to 1.7 times as fast at 2 to 8 tokens, no faster from 32 on.
MAX_SHORT = 16

# A query row per shared head, with the log-sum-exp that sinks need: [B, H, n, D] -> ([B, H, n, Dv], [B, H, n])
_flash_with_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class CpuKernel:
    """Implements `AttentionKernel` over views of the pool, with one call per sequence and layer."""

    name = "cpu"

    def __init__(self, is_local: bool = False) -> None:
        #: True if tokens attend to each other in both directions only within windows.
        self.is_local = is_local
        self._step: PackedStep | None = None
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}
        self._short_masks: dict[tuple[int, int | None, int], Tensor] = {}
        self._visible: dict[int | None, list[VisibleRow]] = {}

    def begin(self, step: PackedStep) -> None:
        self._step = step
        self._masks.clear()
        self._short_masks.clear()
        self._visible.clear()

    def attend(self, query: Tensor, cache: LayerCache, options: AttentionOptions) -> Tensor:
        num_tokens, num_heads, dim = query.shape
        kv_heads = cache.keys.shape[1]
        # [T, Hkv, G, D]: a view, since models lay queries out token by token
        grouped = query.reshape(num_tokens, kv_heads, num_heads // kv_heads, dim)
        plain = options.softcap is None and options.sinks is None
        rows = self._rows(options.window)
        if plain and len(rows) == num_tokens:
            parts = _attend_singles(grouped, rows, cache, options.scaling)
            return torch.cat(parts).view(num_tokens, num_heads, -1)  # [T, Hq, Dv]
        parts = [self._attend_row(grouped, row, cache, options) for row in rows]
        return torch.cat(parts).view(num_tokens, num_heads, -1)  # [T, Hq, Dv]

    def attend_both_ways(self, out: Tensor, query: Tensor, cache: LayerCache, options: AttentionOptions) -> None:
        """Compute the batch rows in which some tokens attend to later ones, and write their results into `out` [T, Hq,
        Dv]. Kernels that support only causal attention call this method for batch rows with images."""
        num_tokens, num_heads, dim = query.shape
        kv_heads = cache.keys.shape[1]
        grouped = query.reshape(num_tokens, kv_heads, num_heads // kv_heads, dim)
        for row in self._rows(options.window):
            if row.mutual:
                part = self._attend_row(grouped, row, cache, options)
                out[row.offset : row.offset + row.length] = part.reshape(row.length, num_heads, -1)

    def _attend_row(self, grouped: Tensor, row: VisibleRow, cache: LayerCache, options: AttentionOptions) -> Tensor:
        """Return the attention of a row's tokens: queries of the step [T, Hkv, G, D] -> [n, Hkv, G, Dv]"""
        plain = options.softcap is None and options.sinks is None
        part = grouped.narrow(0, row.offset, row.length)
        keys, values = row.read(cache, grouped.dtype)
        if row.length == 1 and plain:
            return scaled_dot_product_attention(part, keys, values, scale=options.scaling)
        if row.length <= MAX_SHORT and row.start and plain:
            return self._attend_short(part, keys, values, row, options)
        return self._attend_chunk(part, keys, values, row, options)

    def _rows(self, window: int | None) -> list[VisibleRow]:
        """Return the step's rows with the KV that a layer with this window reads. The step's rows for a window are
        cached for all layers with this window."""
        rows = self._visible.get(window)
        if rows is None:
            assert self._step is not None
            device = self._step.slots.device
            rows = [VisibleRow(row, window, device) for row in self._step.rows]
            if self.is_local and window is None:
                for row in rows:
                    row.mutual = ()
            self._visible[window] = rows
        return rows

    def _attend_short(
        self, part: Tensor, keys: Tensor, values: Tensor, row: VisibleRow, options: AttentionOptions
    ) -> Tensor:
        """Compute the same as `_attend_chunk` by a method that is faster for a few tokens. The heads that share a key
        head become separate query rows."""
        length, kv_heads, group, dim = part.shape
        query = part.transpose(0, 1).reshape(1, kv_heads, length * group, dim)
        mask = self._short_mask(row, options.window, part)
        out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=options.scaling)
        return out.view(kv_heads, length, group, -1).transpose(0, 1)  # [n, Hkv, G, Dv]

    def _attend_chunk(
        self, part: Tensor, keys: Tensor, values: Tensor, row: VisibleRow, options: AttentionOptions
    ) -> Tensor:
        """Return the attention [n, Hkv, G, Dv] of queries [n, Hkv, G, D] over keys [1, Hkv, L, D]."""
        group = part.shape[2]
        query = part.permute(2, 1, 0, 3)  # [G, Hkv, n, D]: groups as a batch over shared keys
        keys, values = keys.expand(group, -1, -1, -1), values.expand(group, -1, -1, -1)
        mask = self._mask(row, options.window, part)
        if options.softcap is not None or (options.sinks is not None and not _has_flash(query, values)):
            out = _attend_by_hand(query, keys, values, mask, options)
        elif options.sinks is not None:
            out = _attend_with_sinks(query, keys, values, mask, options)
        elif mask is None and row.length > 1:
            out = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=options.scaling)
        else:
            out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=options.scaling)
        return out.permute(2, 1, 0, 3)

    def _mask(self, row: VisibleRow, window: int | None, like: Tensor) -> Tensor | None:
        """Return the row's additive attention mask [n, L]; None if the attention is plainly causal."""
        if row.length == 1:
            return None
        key = (row.offset, window)
        if key not in self._masks:
            self._masks[key] = chunk_mask(row.first, row.start, row.context, window, like, row.mutual, self.is_local)
        return self._masks[key]

    def _short_mask(self, row: VisibleRow, window: int | None, part: Tensor) -> Tensor:
        """Return the row's mask [n * G, L] for query rows of G heads that share a key head."""
        group = part.shape[2]
        key = (row.offset, window, group)
        if key not in self._short_masks:
            mask = chunk_mask(row.first, row.start, row.context, window, part, row.mutual, self.is_local)
            assert mask is not None  # several tokens after others
            self._short_masks[key] = mask.repeat_interleave(group, 0)
        return self._short_masks[key]


class VisibleRow:
    """A batch row, and the part of its KV that a layer with a given window reads."""

    __slots__ = ("_slots", "_span", "context", "first", "length", "mutual", "offset", "start")

    def __init__(self, row: PackedRow, window: int | None, device: torch.device) -> None:
        self.offset, self.length, self.context, self.start = row.offset, row.length, row.context, row.start
        self.mutual = row.mutual
        self.first, spans = row.visible(window)
        self._span = spans[0]
        self._slots: Tensor | None = None
        if len(spans) > 1:
            slots = [slot for begin, count in spans for slot in range(begin, begin + count)]
            self._slots = upload_list(slots, torch.int64, device)

    def read(self, cache: LayerCache, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys [1, Hkv, L, D] and values [1, Hkv, L, Dv]. Keys and values are views if the KV is contiguous and
        of `dtype`."""
        return cache.view(*self._span, dtype) if self._slots is None else cache.gather(self._slots, dtype)


def _attend_singles(grouped: Tensor, rows: list[VisibleRow], cache: LayerCache, scaling: float) -> list[Tensor]:
    """Compute the attention of a decode step, with one token per sequence: queries [T, Hkv, G, D] -> [1, Hkv, G, Dv]
    for each token."""
    parts = []
    for query, row in zip(grouped.unsqueeze(1).unbind(0), rows, strict=True):
        keys, values = row.read(cache, grouped.dtype)
        parts.append(scaled_dot_product_attention(query, keys, values, scale=scaling))
    return parts


def _has_flash(query: Tensor, values: Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[-1] == values.shape[-1]


def _attend_with_sinks(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Compute attention with sinks. A sink is like a further key without a value, and only reduces the other weights.
    So the attention result without sinks is multiplied by sigmoid(lse - sink)."""
    assert options.sinks is not None
    causal = mask is None and query.shape[2] > 1
    out: Tensor
    lse: Tensor
    out, lse = _flash_with_lse(query, keys, values, 0.0, causal, attn_mask=mask, scale=options.scaling)
    sinks = options.sinks.view(query.shape[1], query.shape[0]).t().unsqueeze(-1)  # [G, Hkv, 1]
    return out * torch.sigmoid(lse - sinks.to(lse.dtype)).unsqueeze(-1).to(out.dtype)


def _attend_by_hand(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Compute attention step by step, for soft-capped scores and other cases that torch's fused attention does not
    support."""
    length = query.shape[2]
    scores = torch.matmul(query, keys.transpose(2, 3)).float() * options.scaling  # [G, Hkv, n, L]
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores + mask
    elif length > 1:
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.view(query.shape[1], query.shape[0]).t()[..., None, None].to(scores.dtype)
        scores = torch.cat([scores, sinks.expand(-1, -1, length, 1)], -1)
        weights = torch.softmax(scores, -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return torch.matmul(weights.to(values.dtype), values)


def chunk_mask(
    first: int,
    start: int,
    context: int,
    window: int | None,
    like: Tensor,
    mutual: Sequence[tuple[int, int]] = (),
    is_local: bool = False,
) -> Tensor | None:
    """Return a mask [n, L] of `like`'s type: 0 where token `start + i` attends to position `first + j`, -inf elsewhere.
    Positions within one pair (first, end) of `mutual` attend to each other in both directions, also beyond the window
    unless `is_local`. Returns None if the attention is plainly causal: the chunk starts at the first visible position,
    and no window limits it.
    """
    if first == start and not mutual and (window is None or window >= context - start):
        return None
    own = torch.arange(start, context, device=like.device)[:, None]
    other = torch.arange(first, context, device=like.device)[None, :]
    hidden = other > own
    far = torch.zeros_like(hidden) if window is None else own - other >= window
    hidden |= far
    for low, high in mutual:
        seen = (own >= low) & (own < high) & (other >= low) & (other < high)
        hidden &= ~(seen & ~far if is_local else seen)
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(hidden, float("-inf"))
