"""Attention over keys that an indexer selects (DeepSeek Sparse Attention).

The *indexer* of a layer computes a short key for each token. For a new token, the indexer scores all keys and selects
the `index_topk` best positions, to which attention is limited. The KV cache stores index keys as an additional layer,
so all operations on KV blocks apply to them. The indexer of transformers computes the selection, sequence by sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bridle.model.batch_inputs import PackedRow
from bridle.model.forward_context import AttentionOptions, handler_or_none
from bridle.model.index_selection import IndexHandler, IndexRow, Selected, Selection

if TYPE_CHECKING:
    from bridle.model.kv_cache import LayerCache

#: Approximate maximum of scores of an indexer and of attention that are computed at once.
MAX_SCORES = 1 << 24
_TO_MASK = "build_attention_mask_from_topk"


def lead_indexers(model: nn.Module) -> None:
    """Patch the indexers of a model's layers so that they use the paged cache inside steps."""
    for module in model.modules():
        indexer = vars(module).get("_modules", {}).get("indexer")
        if indexer is not None and isinstance(getattr(indexer, "index_topk", None), int):
            vars(indexer)["forward"] = _PagedIndexer(indexer).forward
            vars(module)["forward"] = partial(_with_mask, module.forward)
        if hasattr(module, _TO_MASK):
            vars(module)[_TO_MASK] = partial(_instead_of_mask, getattr(module, _TO_MASK))


def _instead_of_mask(to_mask: Callable[..., Any], topk_indices: Any, **options: Any) -> Any:
    """Inside steps, pass the selected positions unchanged to attention. Outside of steps, let GLM-5.3 convert the
    selected positions to a mask."""
    return topk_indices if isinstance(topk_indices, Selection) else to_mask(topk_indices=topk_indices, **options)


def _with_mask(forward: Callable[..., Any], hidden_states: Tensor, *args: Any, **options: Any) -> Any:
    """Run the forward pass of a layer that slices the attention mask before it calls the indexer. Inside steps there is
    no mask, so the layer gets a dummy mask to slice."""
    if handler_or_none() is not None:
        options["attention_mask"] = hidden_states.new_empty(1, 1, 1, 1)
    return forward(hidden_states, *args, **options)


class _PagedIndexer:
    """Replaces an indexer's `forward` by one that calls the original for each sequence of a step."""

    def __init__(self, indexer: Any) -> None:
        self._indexer, self._compute = indexer, indexer.forward
        self._signature = inspect.signature(indexer.forward)

    def forward(self, *args: Any, **options: Any) -> Any:
        handler: object = handler_or_none()
        if not isinstance(handler, IndexHandler):
            return self._compute(*args, **options)
        given = self._signature.bind(*args, **options).arguments
        num_tokens = given["hidden_states"].shape[1]
        rows = handler.index_rows(self._indexer.layer_idx, num_tokens)
        return Selection([list(self._select(row, given, num_tokens)) for row in rows])

    def _select(self, row: IndexRow, given: dict[str, Any], num_tokens: int) -> Iterator[Selected]:
        most = max(MAX_SCORES // (self._indexer.n_heads * (row.start + row.length)), 1)
        for first in range(0, row.length, most):
            end = min(first + most, row.length)
            part = slice(row.offset + first, row.offset + end)
            own = {name: _part(value, part, num_tokens) for name, value in given.items()}
            seen = _causal(row.start + first, row.start + end, own["hidden_states"].device)[None]
            own["attention_mask"] = seen[..., 0] if hasattr(self._indexer, "index_kpool") else seen
            own["past_key_values"] = _Keys(partial(row.keep, first))
            found = self._compute(**own)[0].long()
            yield Selected(first, end, found if row.start + end > self._indexer.index_topk else None)


class _Keys:
    """The index keys of one sequence in one layer. An indexer gets this object in the place of its cache."""

    def __init__(self, keep: Callable[[Tensor], Tensor]) -> None:
        self._keep = keep
        self.keys = torch.empty(0)

    @property
    def layers(self) -> _Keys:
        return self

    def __getitem__(self, layer_idx: int) -> _Keys:
        return self

    def get_seq_length(self) -> int:
        """Return the number of tokens that have index keys, including the tokens added last. GLM-5.3 calls this."""
        return self.keys.shape[1]

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """Add the index keys [1, n, D] of new tokens; return all index keys [1, L, D] of the sequence."""
        self.keys = self._keep(keys[0]).unsqueeze(0)
        return self.keys


def _part(value: Any, part: slice, num_tokens: int) -> Any:
    """Return the part of an argument that belongs to the packed tokens `part`; arguments without a token dimension are
    returned whole."""
    if isinstance(value, tuple):
        return tuple(_part(each, part, num_tokens) for each in value)
    is_by_token = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == num_tokens
    return value[:, part] if is_by_token else value


def _causal(start: int, end: int, device: torch.device) -> Tensor:
    """Return a causal mask [end - start, end] for the tokens at positions `start` to `end` (exclusive)."""
    own = torch.arange(start, end, device=device)
    return torch.arange(end, device=device) <= own[:, None]


def slots_of(row: PackedRow, device: torch.device) -> Tensor:
    """Return the cache slots of a row's positions, [context]."""
    return torch.cat([torch.arange(slot, slot + length, device=device) for slot, length in row.spans])


def attend_selected(
    dense: Callable[[], Tensor],
    rows: Sequence[PackedRow],
    query: Tensor,  # [T, Hq, D]
    layer: LayerCache,
    options: AttentionOptions,
    selection: Selection,
) -> Tensor:
    """Return attention [T, Hq, Dv] over the positions that the indexer selected. `dense` computes attention over all
    positions, for tokens that select all positions."""
    pieces = [
        (row, piece)
        for row, chosen in zip(rows, selection.rows, strict=True)
        for piece in chosen
        if piece.positions is not None
    ]
    out = query.new_empty(*query.shape[:2], layer.values.shape[2])
    if sum(piece.end - piece.first for _, piece in pieces) < len(query):
        out.copy_(dense())
    for row, piece in pieces:
        part = slice(row.offset + piece.first, row.offset + piece.end)
        out[part] = _attend(query[part], row, piece, layer, options)
    return out


def _attend(query: Tensor, row: PackedRow, piece: Selected, layer: LayerCache, options: AttentionOptions) -> Tensor:
    assert piece.positions is not None
    start, end = row.start + piece.first, row.start + piece.end
    seen = torch.zeros(end - start, end + 1, dtype=torch.bool, device=query.device)
    seen = seen.scatter_(1, piece.positions.remainder(end + 1), True)[:, :end] & _causal(start, end, query.device)
    places = seen.any(0).nonzero()[:, 0]  # for one token, the positions that it selects
    keys, values = layer.gather(slots_of(row, query.device)[places], torch.float32)
    most = max(MAX_SCORES // (query.shape[1] * len(places)), 1)
    parts = [
        attend_seen(some.float(), keys[0], values[0], few, options)
        for some, few in zip(torch.split(query, most), torch.split(seen[:, places], most), strict=True)
    ]
    return torch.cat(parts).to(query.dtype)


def attend_seen(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, options: AttentionOptions) -> Tensor:
    """Return attention [n, Hq, Dv] of queries [n, Hq, D] over keys [Hkv, K, D] and values [Hkv, K, Dv], where the mask
    `seen` is [n, K]."""
    n, num_heads, num_groups = *query.shape[:2], keys.shape[0]
    grouped = query.transpose(0, 1).reshape(num_groups, -1, query.shape[2])  # [Hkv, Hq / Hkv * n, D]
    scores = (grouped @ keys.mT).view(num_heads, n, -1) * options.scaling
    scores = scores.masked_fill(~seen, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float()[:, None, None].expand(*scores.shape[:2], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]  # [Hq, n, K]
    return (weights.reshape(num_groups, -1, keys.shape[1]) @ values).view(num_heads, n, -1).transpose(0, 1)
