"""The attention function that the models of transformers call, and its handler for the engine's steps. The handler also
gives recurrent layers their states. The function is registered in transformers' attention registry, under the name
`bridle`. transformers' mask registry has no entry of this name, so transformers builds no mask and does not guess
packing from positions. Only a step's rows and block tables determine which tokens attend to each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bridle.errors import InternalError
from bridle.model.batch_inputs import PackedRow, PackedStep
from bridle.model.compressed_attention import attend_compressed
from bridle.model.compressed_windows import Compressed
from bridle.model.forward_context import AttentionOptions, current_handler
from bridle.model.index_selection import IndexRow, Selection
from bridle.model.indexed_attention import attend_selected, slots_of
from bridle.model.kernels.interface import AttentionKernel
from bridle.model.kv_cache import KVCache, LayerCache
from bridle.model.state_pool import RowStates, Span, StateKey, StatePool

ATTENTION_NAME = "bridle"


def bridle_attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, D], rotary applied
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, Dv]
    attention_mask: Tensor | Selection | Compressed | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Let the current handler store the new keys and values and compute attention; return its result, [1, T, Hq,
    Dv]."""
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if isinstance(attention_mask, (Selection, Compressed)):
        extra["indices"] = attention_mask
    elif attention_mask is not None and not isinstance(extra.get("indices"), Selection):
        extra["attention_mask"] = attention_mask
    if (change := vars(module).get("change_heads")) is not None:  # see `own_attention`
        query, key, sliding_window = change(query, key)
    options = AttentionOptions(scaling, sliding_window, softcap, s_aux)
    rows = current_handler()(module, _rows(query), _rows(key), _rows(value), options, extra)
    return rows.unsqueeze(0), None


def _rows(heads: Tensor) -> Tensor:
    """Return a view: [1, H, T, D] -> [T, H, D]"""
    return heads[0].transpose(0, 1)


def register() -> None:
    """Register the attention function with transformers. Idempotent; must be called before a model is loaded."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, bridle_attention)


class PagedAttention:
    """The handler of the engine's steps. The handler writes keys and values of the new tokens to the cache, then
    computes attention over the cache."""

    def __init__(self, cache: KVCache, kernel: AttentionKernel, states: StatePool | None = None) -> None:
        self.cache = cache
        self.kernel = kernel
        self.states = states  # of recurrent layers, where the model has any
        self.step: PackedStep | None = None  # set for each step

    @property
    def is_native(self) -> bool:
        """Return whether the C kernels may compute whole layers of the model. The result is False if another attention
        kernel was requested."""
        return self.step is not None and self.kernel.name == "native"

    @property
    def is_plain(self) -> bool:
        """Return whether attention is computed by CPU kernels or by the reference. If so, no GPU kernel computes any
        part of a layer."""
        return self.kernel.name in ("cpu", "native", "reference")

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
        extra: dict[str, Any],
    ) -> Tensor:
        number: Any = module.layer_idx
        layer = self.cache.layers[number]
        assert self.step is not None
        layer.write(self.step.slots, key, value)
        selection = extra.get("indices")
        if isinstance(selection, Compressed):
            return attend_compressed(self.step.rows, query, layer, self.cache.layers[~number], options, selection)
        dense = partial(self.kernel.attend, query, layer, options)
        if selection is None:
            return dense()
        return attend_selected(dense, self.step.rows, query, layer, options, selection)

    def index_rows(self, layer: int, num_tokens: int) -> list[IndexRow]:
        """Return the packed tokens of the step for an indexer, one row per sequence."""
        assert self.step is not None
        keep = partial(self._keep_index, self.cache.layers[~layer])
        return [IndexRow(row.offset, row.length, row.start, partial(keep, row)) for row in self.step.rows]

    def _keep_index(self, index: LayerCache, row: PackedRow, first: int, keys: Tensor) -> Tensor:
        assert self.step is not None
        begin, half = row.offset + first, index.keys.shape[2]
        slots = self.step.slots[begin : begin + len(keys)]
        index.write(slots, keys[:, None, :half], keys[:, None, half:])
        places = slots_of(row, keys.device)[: row.start + first + len(keys)]
        return torch.cat(index.gather(places, keys.dtype), -1)[0, 0]

    def spans(self, layer: int, num_tokens: int) -> list[Span]:
        """Return the packed tokens of the step for a recurrent layer, as spans with the state of their sequence."""
        assert self.step is not None
        if self.states is None:
            raise InternalError(f"layer {layer} is recurrent, but the executor has no pool of states")
        return [span for row in self.step.rows for span in _row_spans(self.states, layer, row)]


def _row_spans(pool: StatePool, layer: int, row: PackedRow) -> Iterator[Span]:
    """Yield the spans of consecutive tokens in a batch row. A span ends at the end of the row and where a recurrent
    state is saved."""
    tensors = pool.view(layer, row.state)
    for length, is_fresh, slots in row.pieces():
        after = partial(_save, pool, layer, row.state, slots) if slots else None
        yield Span(length, RowStates(tensors, is_fresh), after)


def _save(pool: StatePool, layer: int, source: int, targets: list[int], key: StateKey) -> None:
    for target in targets:
        pool.save(layer, source, target, key)
