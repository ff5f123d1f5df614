"""Windows of tokens that DeepSeek V4's layers compress into one entry each, kept token by token.

The compressors of transformers keep the tokens of an incomplete window, so their cache cannot be rolled back. Here each
token keeps the compressors' inputs, and the last token of a window keeps the window's entry. So the cached values
depend only on the tokens before them, like keys and values, and all operations on KV blocks apply to them. The modules
of transformers compress the windows, sequence by sequence.
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
    """A layer's records of the tokens of one sequence. `inputs` [slots, A] are the inputs of compressors, and `entries`
    [slots, D] the entries of windows, by the names of compressors. The records of position p are in slot `slots[p]`."""

    inputs: Tensor
    entries: Mapping[str, Tensor]
    slots: Tensor


class _Columns(NamedTuple):
    """A compressor, and the columns of its inputs in the records of tokens."""

    module: Any
    inputs: slice


class Piece(NamedTuple):
    """Consecutive tokens of a row, the entries [W, D] of windows up to them, and a mask [n, W] of the entries that each
    token attends to."""

    first: int
    end: int
    entries: Tensor
    seen: Tensor


class Compressed:
    """The tokens of a step as input of a layer's compressor. The object is passed in the place of the layer's cache and
    mask. The tokens are compressed when attention asks for the entries of a sequence."""

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
        """Return the step's own keys and values: attention itself stores them."""
        return key, value

    def take(self, compress: Callable[..., tuple[Tensor, Tensor | None]], *given: Tensor) -> None:
        """Keep the compressor's function and its inputs [1, T, ...]."""
        self._compress, self._given = compress, given

    def pieces(self, offset: int, length: int, start: int, records: TokenRecords) -> Iterator[Piece]:
        """Compress `length` packed tokens of one sequence from `offset` on, the first of them at position `start`."""
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
    """Replaces the layer's cache of transformers for the tokens of a sequence at positions `start` to `end - 1`."""

    def __init__(self, columns: dict[str, _Columns], records: TokenRecords, start: int, end: int) -> None:
        self._columns, self._records, self._start, self._end = columns, records, start, end

    @property
    def layers(self) -> _Windows:
        return self

    def __getitem__(self, layer_idx: int) -> _Windows:
        return self

    def _whole(self, ratio: int) -> tuple[int, int]:
        """Return the first position and the end of the windows that these tokens complete."""
        return self._start // ratio * ratio, self._end // ratio * ratio

    def _inputs(self, name: str, first: int, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values and gates of tokens that a compressor reads, [1, n, width] each."""
        found = self._records.inputs[:, self._columns[name].inputs].index_select(0, self._records.slots[first:end])
        kv, gate = found.to(like.dtype).unsqueeze(0).chunk(2, -1)
        return kv, gate

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        """Keep `kv` and `gate` [1, n, width] of the tokens. Return the `kv` and `gate` of the windows that are complete
        now, and their first position."""
        pool = self._records.inputs[:, self._columns[name].inputs]
        pool.index_copy_(0, self._records.slots[self._start : self._end], torch.cat((kv, gate), -1)[0].to(pool.dtype))
        first, end = self._whole(self._columns[name].module.compress_rate)
        return *self._inputs(name, first, end, kv), first

    def update_overlap_state(
        self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the part of the previous window that is added to the first new one, [1, ratio, head_dim] each."""
        module = self._columns[name].module
        first, _ = self._whole(module.compress_rate)
        if first == 0:
            return None, None
        kv, gate = self._inputs(name, first - module.compress_rate, first, chunk_kv)
        return kv[..., :head_dim], (gate + module.position_bias)[..., :head_dim]

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Keep the entries [1, n, D] of the new windows at their last tokens. Return the entries of all windows, [1, W,
        D]."""
        ratio = self._columns[name].module.compress_rate
        pool, slots = self._records.entries[name], self._records.slots
        first, end = self._whole(ratio)
        pool.index_copy_(0, slots[first:end][ratio - 1 :: ratio], compressed[0].to(pool.dtype))
        return pool.index_select(0, slots[: self._end][ratio - 1 :: ratio]).to(compressed.dtype).unsqueeze(0)
