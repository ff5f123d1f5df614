"""All layers of a dense model in one call of the kernels, and attention alone. The arguments of the C functions are
checked here.

The order of the fields is that of sources/layer.h and sources/attention.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from bridle.errors import InternalError
from bridle.native.kernels import CMatrix, Kernels, Matrix, check_tensor, scratch_bytes

MAX_DIM, MAX_GROUP, MAX_PARTS = 256, 32, 3
_MAX_TOKENS = 1 << 20


class CLayer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("norm", "mlp_norm", "head_norm", "keys", "values")),
        ("qkv", CMatrix * 3),
        ("out", CMatrix),
        ("gate_up", CMatrix * 2),
        ("down", CMatrix),
        *((name, c_int) for name in ("num_qkv", "num_gate_up", "is_rotated", "window")),
        *((name, c_float) for name in ("eps", "mlp_eps", "head_eps", "scale")),
    )


class CStep(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("cos", "sin", "slots", "rows", "spans")),
        *((name, c_void_p) for name in ("hidden", "normed", "wide", "attended", "scratch")),
        *((name, c_int) for name in ("tokens", "num_rows", "chunks", "hidden_size", "gates", "heads", "kv_heads")),
        *((name, c_int) for name in ("dim", "parallel")),
    )


class CAttention(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("q", "keys", "values", "sinks", "rows", "spans", "out")),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int) for name in ("num_rows", "q_stride", "heads", "kv_heads", "dim", "window")),
    )


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, the key heads that they share, and their width."""

    heads: int
    kv_heads: int
    dim: int

    def fit(self, lanes: int) -> bool:
        """Whether kernels with this many lanes can attend with them."""
        is_even = self.kv_heads > 0 and self.heads % self.kv_heads == 0
        is_small = self.dim <= MAX_DIM and self.heads <= MAX_GROUP * max(self.kv_heads, 1)
        return is_even and is_small and self.dim % lanes == 0


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights, all in float32 except the packed ones."""

    norm: Tensor  # [hidden]
    mlp_norm: Tensor  # [hidden]
    head_norm: Tensor | None  # [heads + kv heads, dim]
    qkv: Sequence[Matrix]
    out: Matrix
    gate_up: Sequence[Matrix]
    down: Matrix
    eps: float
    mlp_eps: float
    head_eps: float
    scale: float
    window: int | None
    is_rotated: bool


class Rows:
    """The rows of a step for attention: for each sequence its packed tokens, its context, and where its KV lies.

    `sequences` are (offset, length, context, spans), spans (slot, count) from position 0 on.
    """

    def __init__(
        self,
        sequences: Sequence[tuple[int, int, int, Sequence[tuple[int, int]]]],
        num_slots: int,
        tokens_per_chunk: int,
    ) -> None:
        fields: list[int] = []
        spans: list[int] = []
        self.num_tokens = self.num_chunks = 0  # chunks of one key head
        for offset, length, context, places in sequences:
            _require(0 < length <= context < 1 << 30 and offset == self.num_tokens, f"a row of {length} in {context}")
            fields += (offset, length, context, len(spans) // 2, self.num_chunks)
            held = 0
            for slot, count in places:
                _require(slot >= 0 and count > 0 and slot + count <= num_slots, f"a span of {count} from {slot} on")
                spans += (slot, count)
                held += count
            _require(held == context, f"spans hold {held} of {context} positions")
            self.num_tokens += length
            self.num_chunks += -(-length // tokens_per_chunk)
        self.num_rows = len(sequences)
        self.spans = torch.tensor(spans, dtype=torch.int64)
        self._fields = torch.tensor(fields, dtype=torch.int64).view(-1, 5)

    def table(self, kv_heads: int) -> Tensor:
        """[rows, 5] with the first chunk of each row, all key heads counted."""
        table = self._fields.clone()
        table[:, 4] *= kv_heads
        return table


class Layers:
    """Layers of one model over one cache, ready to be called."""

    def __init__(
        self, found: Kernels, layers: Sequence[Layer], heads: Heads, caches: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        first = layers[0]
        self._found, self._heads, self._layers, self._caches = found, heads, layers, caches
        self._hidden, self._gates = first.out.outputs, first.down.given
        self.num_slots = caches[0][0].shape[0]
        _require(heads.fit(found.lanes) and len(layers) == len(caches), f"{heads} in {len(layers)} layers")
        self._c = (CLayer * len(layers))(*map(self._describe, layers, caches))
        self._function = found.function("bridle_layers", POINTER(CStep), POINTER(CLayer), c_int)
        self._widest = max(2 * self._gates, (heads.heads + 2 * heads.kv_heads) * heads.dim)
        matrices = [m for layer in layers for m in (*layer.qkv, layer.out, *layer.gate_up, layer.down)]
        self._scratch = max(scratch_bytes(matrix, 1) for matrix in matrices)

    def _describe(self, layer: Layer, cache: tuple[Tensor, Tensor]) -> CLayer:
        heads, hidden, gates = self._heads, self._hidden, self._gates
        inner, both = heads.heads * heads.dim, heads.heads + heads.kv_heads
        for name, parts, inputs, outputs in (
            ("qkv", layer.qkv, hidden, (both + heads.kv_heads) * heads.dim),
            ("out", [layer.out], inner, hidden),
            ("gate_up", layer.gate_up, hidden, 2 * gates),
            ("down", [layer.down], gates, hidden),
        ):
            is_right = all(part.given == inputs for part in parts) and sum(part.outputs for part in parts) == outputs
            _require(is_right and len(parts) <= (2 if name == "gate_up" else MAX_PARTS), f"{name} of {outputs} outputs")
        for weight in (layer.norm, layer.mlp_norm):
            check_tensor(weight, torch.float32, hidden, "a norm")
        if layer.head_norm is not None:
            check_tensor(layer.head_norm, torch.float32, both * heads.dim, "the norm of heads")
        for tensor in cache:
            check_tensor(tensor, torch.float32, self.num_slots * heads.kv_heads * heads.dim, "the cache")
        return CLayer(
            layer.norm.data_ptr(),
            layer.mlp_norm.data_ptr(),
            None if layer.head_norm is None else layer.head_norm.data_ptr(),
            *(tensor.data_ptr() for tensor in cache),
            (CMatrix * 3)(*(part.c for part in layer.qkv)),
            layer.out.c,
            (CMatrix * 2)(*(part.c for part in layer.gate_up)),
            layer.down.c,
            len(layer.qkv),
            len(layer.gate_up),
            int(layer.is_rotated),
            layer.window or 0,
            layer.eps,
            layer.mlp_eps,
            layer.head_eps,
            layer.scale,
        )

    @property
    def tokens_per_chunk(self) -> int:
        return self._found.queries * self._heads.kv_heads // self._heads.heads

    def advance(self, hidden: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, rows: Rows) -> Tensor:
        """`hidden` [T, hidden] after all layers, in place; `cos` and `sin` [T, ..., dim], `slots` [T]."""
        heads, tokens = self._heads, hidden.shape[0]
        _require(0 < tokens < _MAX_TOKENS and tokens == rows.num_tokens, f"{tokens} tokens, {rows.num_tokens} of rows")
        check_tensor(hidden, torch.float32, tokens * self._hidden, "hidden")
        for table in (cos, sin):
            check_tensor(table, torch.float32, tokens * heads.dim, "a rotation")
        check_tensor(slots, torch.int64, tokens, "slots")
        _require(int(slots.min()) >= 0 and int(slots.max()) < self.num_slots, "a slot that the cache does not have")
        normed = torch.empty(tokens, self._hidden)
        wide, attended = torch.empty(tokens, self._widest), torch.empty(tokens, heads.heads * heads.dim)
        scratch, table = torch.empty(tokens * self._scratch, dtype=torch.uint8), rows.table(heads.kv_heads)
        step = CStep(
            *(tensor.data_ptr() for tensor in (cos, sin, slots, table, rows.spans)),
            *(tensor.data_ptr() for tensor in (hidden, normed, wide, attended, scratch)),
            *(tokens, rows.num_rows, rows.num_chunks * heads.kv_heads, self._hidden, self._gates),
            *(heads.heads, heads.kv_heads, heads.dim, int(torch.get_num_threads() > 1)),
        )
        self._function(step, self._c, len(self._layers))
        return hidden


def attend(
    found: Kernels,
    query: Tensor,  # [T, heads, dim]
    cache: tuple[Tensor, Tensor],  # [slots, kv heads, dim] each
    rows: Rows,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [heads]
) -> Tensor:
    """The result of attention for each token: [T, heads, dim]."""
    tokens, num_heads, dim = query.shape
    num_slots, kv_heads, _ = cache[0].shape
    heads = Heads(num_heads, kv_heads, dim)
    _require(heads.fit(found.lanes) and tokens == rows.num_tokens, f"{heads} for {tokens} tokens")
    query = query.contiguous()
    check_tensor(query, torch.float32, tokens * num_heads * dim, "queries")
    for tensor in cache:
        check_tensor(tensor, torch.float32, num_slots * kv_heads * dim, "the cache")
    if sinks is not None:
        sinks = sinks.detach().float().contiguous()
        check_tensor(sinks, torch.float32, num_heads, "sinks")
    out, table = torch.empty(tokens, num_heads, dim), rows.table(kv_heads)
    call = CAttention(
        *(tensor.data_ptr() for tensor in (query, *cache)),
        None if sinks is None else sinks.data_ptr(),
        *(tensor.data_ptr() for tensor in (table, rows.spans, out)),
        *(scale, softcap or 0.0, rows.num_rows, num_heads * dim, num_heads, kv_heads, dim, window or 0),
    )
    function = found.function("bridle_attend", POINTER(CAttention), c_int, c_int)
    function(call, rows.num_chunks * kv_heads, int(torch.get_num_threads() > 1))
    return out


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InternalError(f"not for a kernel: {what}")
