"""Additive masks for chunks of a prompt: they say which of the read positions each token of a chunk sees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def chunk_mask(
    first: int,
    start: int,
    context: int,
    window: int | None,
    like: Tensor,
    mutual: Sequence[tuple[int, int]] = (),
    is_local: bool = False,
) -> Tensor | None:
    """[n, L] with 0 where token `start + i` sees position `first + j`, -inf elsewhere, in `like`'s type. Positions
    within the same pair of `mutual` (first, end) see each other both ways, beyond the window too unless it `is_local`.

    None if the chunk starts at the first visible position and no window cuts it: plain causal order then.
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
