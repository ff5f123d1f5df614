"""A cache for DeepSeek V4's compressors, which compress each window of tokens into one entry. The compressors of
transformers buffer the tokens of an incomplete window, so their cache cannot be rolled back. bridle's cache stores the
compressors' inputs of every token, and a window's entry at the window's last token. So a cached value depends only on
its token and earlier tokens, like keys and values. All operations on KV blocks therefore work for this cache. The
modules of transformers compress the windows, sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Approximate maximum of scores of an indexer and of attention that are computed at once.
MAX_SCORES = 1 << 24


@dataclass(frozen=True, slots=True)
class TokenRecords:
    """The cache of one layer, and the slots of one sequence in it. `inputs` [slots, A] are the inputs of compressors.
    `entries` has the entries [slots, D] of windows, by compressor. Position p of the sequence is in slot `slots[p]`."""

    inputs: Tensor
    entries: Mapping[str, Tensor]
    slots: Tensor


class _Columns(NamedTuple):
    """A compressor, and the columns of its inputs in `TokenRecords.inputs`."""

    module: Any
    inputs: slice


class Piece(NamedTuple):
    """Consecutive tokens of a row, from `first` to `end` (exclusive). `entries` [W, D] are the entries of all windows
    up to the last token of the piece. The mask `seen` [n, W] marks the entries that each token attends to."""

    first: int
    end: int
    entries: Tensor
    seen: Tensor


class Compressed:
    """Collects the tokens of a step for a layer's compressor. In the place of its cache and mask, the layer gets a
    `Compressed` object. The tokens of a sequence are compressed when attention asks for the sequence's entries."""

    def __init__(self, compressor: Any, num_heads: int, window: int) -> None:
        indexer = getattr(compressor, "indexer", None)
        self._num_heads = max(num_heads, 0 if indexer is None else indexer.num_heads)
        self._window, self._ratio = window, compressor.compress_rate
        self.entry_dim: int = compressor.head_dim
        self.index_dim: int = 0 if indexer is None else indexer.head_dim
        self.num_inputs = 0
        self._columns: dict[str, _Columns] = {}
        for name, module in (("compressor", compressor), ("indexer", indexer)):
            if module is not None:
                begin, self.num_inputs = self.num_inputs, self.num_inputs + 2 * module.position_bias.shape[1]
                self._columns[name] = _Columns(module, slice(begin, self.num_inputs))
        self._compress: Callable[..., tuple[Tensor, Tensor | None]]
        self._given: tuple[Tensor, ...] = ()

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return the step's keys and values unchanged, because the attention handler stores them."""
        return key, value

    def take(self, compress: Callable[..., tuple[Tensor, Tensor | None]], *given: Tensor) -> None:
        """Record the compressor's function and its inputs [1, T, ...] for `pieces`."""
        self._compress, self._given = compress, given

    def pieces(self, offset: int, length: int, start: int, records: TokenRecords) -> Iterator[Piece]:
        """Compress `length` packed tokens of one sequence, from packed token `offset` and position `start` on. Yield
        the compressed tokens in pieces of consecutive tokens."""
        num_seen = self._window + (start + length) // self._ratio
        most = max(min(MAX_SCORES // (self._num_heads * num_seen), self._window), 1)
        for first in range(0, length, most):
            end = min(first + most, length)
            given = (each[:, offset + first : offset + end] for each in self._given)
            windows = _Windows(self._columns, records, start + first, start + end)
            found, bias = self._compress(*given, windows, 0)
            entries = found[0, 0]
            seen = entries.new_ones(end - first, len(entries)) > 0 if bias is None else bias[0, 0] == 0
            yield Piece(first, end, entries, seen)


class _Windows:
    """Replaces transformers' cache of a layer, for the tokens at positions `start` to `end - 1` of one sequence."""

    def __init__(self, columns: dict[str, _Columns], records: TokenRecords, start: int, end: int) -> None:
        self._columns, self._records, self._start, self._end = columns, records, start, end

    @property
    def layers(self) -> _Windows:
        return self

    def __getitem__(self, layer_idx: int) -> _Windows:
        return self

    def _whole(self, ratio: int) -> tuple[int, int]:
        """Return the first position and the end (exclusive) of the windows of `ratio` tokens that the new tokens
        complete."""
        return self._start // ratio * ratio, self._end // ratio * ratio

    def _inputs(self, name: str, first: int, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cached values and gates of positions `first` to `end` (exclusive) for a compressor, [1, n, width]
        each."""
        found = self._records.inputs[:, self._columns[name].inputs].index_select(0, self._records.slots[first:end])
        kv, gate = found.to(like.dtype).unsqueeze(0).chunk(2, -1)
        return kv, gate

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        """Store `kv` and `gate` [1, n, width] of the tokens. Return `kv` and `gate` of the windows that the new tokens
        complete, and the first position of these windows."""
        pool = self._records.inputs[:, self._columns[name].inputs]
        pool.index_copy_(0, self._records.slots[self._start : self._end], torch.cat((kv, gate), -1)[0].to(pool.dtype))
        first, end = self._whole(self._columns[name].module.compress_rate)
        return *self._inputs(name, first, end, kv), first

    def update_overlap_state(
        self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the values and gates of the window before the first new window, [1, ratio, head_dim] each. A
        compressor with overlapping windows reads the values and gates of the previous window."""
        module = self._columns[name].module
        first, _ = self._whole(module.compress_rate)
        if first == 0:
            return None, None
        kv, gate = self._inputs(name, first - module.compress_rate, first, chunk_kv)
        return kv[..., :head_dim], (gate + module.position_bias)[..., :head_dim]

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Store the entries [1, n, D] of the new windows, each at the last token of its window. Return the entries of
        all complete windows of the sequence, [1, W, D]."""
        ratio = self._columns[name].module.compress_rate
        pool, slots = self._records.entries[name], self._records.slots
        first, end = self._whole(ratio)
        pool.index_copy_(0, slots[first:end][ratio - 1 :: ratio], compressed[0].to(pool.dtype))
        return pool.index_select(0, slots[: self._end][ratio - 1 :: ratio]).to(compressed.dtype).unsqueeze(0)
