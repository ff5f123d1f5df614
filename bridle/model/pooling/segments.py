"""Packs several texts into one row of tokens, without padding, and computes attention within each text. Texts are
sorted by length. All texts of one length form a block `[num_texts, length]`, which is computed in one call. A text's
result does not depend on the other texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from bridle.errors import UnsupportedModel
from bridle.model.forward_context import AttentionOptions


class TextBlock(NamedTuple):
    """`num_texts` texts of `length` tokens each, from token `start` on."""

    start: int
    num_texts: int
    length: int

    def of(self, rows: Tensor) -> Tensor:
        """Return the block's tokens in `rows` [T, ...] as a view [num_texts, length, ...]."""
        part = rows[self.start : self.start + self.num_texts * self.length]
        return torch.unflatten(part, 0, (self.num_texts, self.length))


class Segments:
    """The packing order and the blocks of several texts, given their lengths. `order[i]` is the index of the text that
    is packed as text i."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.blocks: list[TextBlock] = []
        start = 0
        for length, group in groupby(lengths[number] for number in self.order):
            count = len(list(group))
            self.blocks.append(TextBlock(start, count, length))
            start += count * length

    def positions(self, offset: int) -> Tensor:
        """Return the position of each packed token in its text, [T], counted from `offset`."""
        return torch.cat([torch.arange(offset, offset + b.length).repeat(b.num_texts) for b in self.blocks])

    def restored(self, rows: Tensor) -> Tensor:
        """Reorder rows [N, ...], one per packed text, to the original order of the texts."""
        return rows[torch.argsort(torch.tensor(self.order)).to(rows.device)]


#: Returns the bias of the scores [num_texts, H, length, length] of a block, given its queries and its keys.
Bias = Callable[[Tensor, Tensor], Tensor]


class SegmentAttention:
    """The attention handler of packed passes: each token attends to its own text. In a causal layer, a token attends
    only to itself and earlier tokens. A layer may pass a `Bias` as the keyword `bias`."""

    def __init__(self, segments: Segments) -> None:
        self.blocks = segments.blocks
        self._masks: dict[tuple[int, int | None, bool], Tensor] = {}

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,  # [T, Hq, D]
        key: Tensor,  # [T, Hkv, D]
        value: Tensor,  # [T, Hkv, Dv]
        options: AttentionOptions,
        extra: dict[str, Any],
    ) -> Tensor:
        if options.sinks is not None:
            raise UnsupportedModel(f"{type(module).__name__} has attention sinks, which packed batches do not support")
        told = extra.get("is_causal")
        is_causal = bool(getattr(module, "is_causal", False) if told is None else told)
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        bias: Bias | None = extra.get("bias")
        for block in self.blocks:
            q, k, v = (block.of(rows).transpose(1, 2) for rows in (query, key, value))  # [num_texts, H, length, D]
            if bias is None:
                found = self._attend(q, k, v, options, is_causal)
            else:
                added = bias(q, k).to(q.dtype)
                found = functional.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=options.scaling)
            block.of(out).copy_(found.transpose(1, 2))
        return out

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, is_causal: bool) -> Tensor:
        """Return the attention of a block of texts: [num_texts, Hq, length, Dv]"""
        length, shares = query.shape[2], query.shape[1] != key.shape[1]
        narrow = options.window is not None and options.window < length
        if options.softcap is not None:
            seen = self._mask(length, options.window if narrow else None, is_causal, query.device)
            return _capped(query, key, value, options, seen)
        mask = self._mask(length, options.window, is_causal, query.device) if narrow else None
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=is_causal and mask is None,
            scale=options.scaling,
            enable_gqa=shares,
        )

    def _mask(self, length: int, window: int | None, is_causal: bool, device: torch.device) -> Tensor:
        """Return a boolean mask [length, length] of which key tokens each query token attends to. The size of a window
        includes the token itself. If the layer is not causal, the window extends in both directions."""
        known = self._masks.get((length, window, is_causal))
        if known is None:
            places = torch.arange(length, device=device)
            ahead = places[None, :] - places[:, None]  # of the key, seen from the query
            known = torch.ones(length, length, dtype=torch.bool, device=device)
            if window is not None:
                known &= ahead.abs() < window
            if is_causal:
                known &= ahead <= 0
            self._masks[length, window, is_causal] = known
        return known


def _capped(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, mask: Tensor) -> Tensor:
    """Compute attention with soft-capped scores (bounded by tanh), which torch's fused attention does not support."""
    times = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(times, 1) for part in (key, value))
    assert options.softcap is not None
    scores = query @ key.transpose(-1, -2) * options.scaling
    scores = torch.tanh(scores / options.softcap) * options.softcap
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32)
    return weights.to(value.dtype) @ value
