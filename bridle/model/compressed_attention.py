"""Attention over a sliding window of tokens, and over compressed entries for the tokens before it (DeepSeek V4). An
entry summarizes a fixed number of tokens. The KV cache holds the keys, which are also the values. The cache stores
entries in the place of values, each at the last token that the entry covers. The compressors' inputs of each token, and
the entries of an indexer, are cached as an additional layer (see `compressed_windows`). Layers without a compressor
have ordinary attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bridle.model.batch_inputs import PackedRow
from bridle.model.compressed_windows import Compressed, Piece, TokenRecords
from bridle.model.forward_context import AttentionOptions, handler_or_none
from bridle.model.indexed_attention import attend_seen, slots_of

if TYPE_CHECKING:
    from bridle.model.kv_cache import LayerCache


def lead_compressors(model: nn.Module) -> None:
    """Patch the compressors of a model's layers so that they use the paged cache inside steps."""
    for module in model.modules():
        compressor = vars(module).get("_modules", {}).get("compressor")
        if compressor is not None:
            vars(compressor)["forward"] = partial(_compress, compressor.forward)
            vars(module)["forward"] = partial(_attend_later, module, module.forward)


def _attend_later(module: Any, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run an attention layer's original forward function. Inside steps, the layer's compressor runs later, when
    attention is computed."""
    if handler_or_none() is not None:
        found = Compressed(module.compressor, module.num_heads, module.sliding_window)
        options |= {"past_key_values": found, "attention_mask": found}
    return forward(*args, **options)


def _compress(
    compute: Callable[..., Any],
    hidden_states: Tensor,
    q_residual: Tensor,
    position_ids: Tensor,
    past_key_values: Any,
    layer_idx: int,
) -> Any:
    """Run a compressor's original forward function. Inside steps, only record the compressor's inputs, and return no
    entries."""
    if not isinstance(past_key_values, Compressed):
        return compute(hidden_states, q_residual, position_ids, past_key_values, layer_idx)
    past_key_values.take(compute, hidden_states, q_residual, position_ids)
    return hidden_states.new_empty(1, 1, 0, past_key_values.entry_dim), None


def attend_compressed(
    rows: Sequence[PackedRow],
    query: Tensor,  # [T, Hq, D]
    layer: LayerCache,
    records: LayerCache,
    options: AttentionOptions,
    compressed: Compressed,
) -> Tensor:
    """Compress the new tokens, then return attention [T, Hq, D] over the sliding window and the entries."""
    out = torch.empty_like(query)
    entries = {"compressor": layer.values[:, 0], "indexer": records.values[:, 0]}
    for row in rows:
        slots = slots_of(row, query.device)
        kept = TokenRecords(records.keys[:, 0], entries, slots)
        for piece in compressed.pieces(row.offset, row.length, row.start, kept):
            part = slice(row.offset + piece.first, row.offset + piece.end)
            out[part] = _attend(query[part], row.start + piece.first, piece, layer, slots, options)
    return out


def _attend(
    query: Tensor, start: int, piece: Piece, layer: LayerCache, slots: Tensor, options: AttentionOptions
) -> Tensor:
    """Return the attention of the queries `query` of `piece`. The first token of `piece` is at position `start`."""
    assert options.window is not None
    end = start + len(query)
    first = max(0, start - options.window + 1)
    own, near = torch.arange(start, end, device=query.device)[:, None], torch.arange(first, end, device=query.device)
    chosen = piece.seen.any(0)
    keys = torch.cat((layer.keys[:, 0].index_select(0, slots[first:end]).float(), piece.entries[chosen].float()))
    seen = torch.cat(((near <= own) & (near > own - options.window), piece.seen[:, chosen]), 1)
    return attend_seen(query.float(), keys[None], keys[None], seen, options).to(query.dtype)
