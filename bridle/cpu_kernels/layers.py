"""Calls the C kernels for all layers of a model at once, or for attention alone. This module checks the arguments of
the C functions. The fields of this module's structs have the order of sources/layer.h and sources/attention.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_float, c_int, c_void_p, pointer
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bridle.cpu_kernels.kernels import CMatrix, Kernels, Matrix, check_tensor, require, scratch_bytes
from bridle.cpu_kernels.mixers import CMixer, CStateRows, Mixer, MixerStates, StateRows
from bridle.cpu_kernels.threads import is_parallel

MAX_DIM, MAX_GROUP, MAX_PARTS = 256, 32, 4
_MAX_TOKENS = 1 << 20
#: Codes of the types of keys and values, and of the activations, in sources/attention.h and layer.h.
KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu2": 2}
#: Input of the first half of a layer: the layer's own rows, own rows that it also keeps, or the rows that the previous
#: layer kept.
ALONE, KEEPS, READS = range(3)
#: The parts of a layer after which adapters can add to the results, and the end.
QKV, ATTEND, GATES, DOWN, END = range(5)


class CLayer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("norm", "last_norm", "mlp_norm", "mlp_last_norm", "head_norm", "sinks")),
        *((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        ("mixer", POINTER(CMixer)),
        ("qkv", CMatrix * MAX_PARTS),
        ("out", CMatrix),
        ("gate_up", CMatrix * 2),
        ("down", CMatrix),
        ("factors", c_void_p),
        *((name, c_int) for name in ("num_qkv", "num_gate_up", "rotation", "window", "kv", "activation")),
        *((name, c_int) for name in ("is_norm_of_all_heads", "beside", "has_gate")),
        *((name, c_float) for name in ("eps", "mlp_eps", "head_eps", "scale", "softcap", "share")),
    )


class CStep(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("cos", "sin", "slots", "rows", "spans")),
        *((name, c_void_p) for name in ("hidden", "normed", "wide", "attended", "mixed", "kept", "scratch")),
        ("states", CStateRows),
        *((name, c_int) for name in ("tokens", "num_rows", "chunks", "hidden_size", "heads", "kv_heads")),
        *((name, c_int) for name in ("dim", "turned", "parallel")),
    )


class CAttention(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("q", "sinks", "keys", "values", "key_scales", "value_scales")),
        *((name, c_void_p) for name in ("rows", "spans", "out")),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int) for name in ("num_rows", "q_stride", "heads", "kv_heads", "dim", "window", "kv")),
    )


@dataclass(frozen=True, slots=True)
class Heads:
    """The number of query heads, the number of key heads that they share, and the width of a head."""

    heads: int
    kv_heads: int
    dim: int

    def fit(self, lanes: int) -> bool:
        """Return whether kernels with `lanes` lanes per vector support this number and width of heads."""
        is_even = self.kv_heads > 0 and self.heads % self.kv_heads == 0
        is_small = self.dim <= MAX_DIM and self.heads <= MAX_GROUP * max(self.kv_heads, 1)
        return is_even and is_small and self.dim % lanes == 0


class LayerKV(NamedTuple):
    """The cached keys and values of a layer: float32, bfloat16, or int8 with scales."""

    keys: Tensor  # [slots, kv heads, dim]
    values: Tensor
    key_scales: Tensor | None = None  # [slots, kv heads] float32
    value_scales: Tensor | None = None

    @property
    def num_slots(self) -> int:
        return self.keys.shape[0]

    def pointers(self, heads: Heads) -> tuple[int | None, ...]:
        """Return the addresses of keys, values and scales. Raises `InternalError` if a size or type is wrong."""
        slots, dtype = self.num_slots * heads.kv_heads, self.keys.dtype
        require(dtype in KV_TYPES, f"keys of {dtype}")
        for tensor in (self.keys, self.values):
            check_tensor(tensor, dtype, slots * heads.dim, "the cache")
        found = []
        for scales in (self.key_scales, self.value_scales):
            require(
                (scales is None) == (dtype is not torch.int8), f"a cache of {dtype} with scales: {scales is not None}"
            )
            if scales is not None:
                check_tensor(scales, torch.float32, slots, "the scales of the cache")
            found.append(None if scales is None else scales.data_ptr())
        return (self.keys.data_ptr(), self.values.data_ptr(), *found)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights: packed matrices, and all other weights in float32. `rotation` is the number of the layer's
    rotation table (RoPE), counted from 1; 0 means no rotation. A layer has two halves: attention (or a mixer) and the
    MLP. The result of each half is multiplied by `share` before it is added to the hidden states. A recurrent layer has
    a `mixer` instead of attention; the mixer's input is the product of `qkv`. `qkv` and `out` are empty without
    attention or a mixer; `gate_up` and `down` are empty without an MLP. If two parallel layers read the same hidden
    states, the first layer stores a copy for the second layer."""

    norm: Tensor | None  # [hidden], like all norms except that of heads
    last_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp_last_norm: Tensor | None
    head_norm: Tensor | None  # [heads + kv heads, dim]
    is_norm_of_all_heads: bool
    qkv: Sequence[Matrix]
    out: Matrix | None
    gate_up: Sequence[Matrix]
    down: Matrix | None
    activation: str
    eps: float
    mlp_eps: float
    head_eps: float
    share: float
    rotation: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # [heads]
    mixer: Mixer | None = None
    has_gate: bool = False  # each query head is followed by a gate of its attention output
    factors: Tensor | None = None  # of the outputs of the layer's first product
    beside: int = ALONE

    @property
    def matrices(self) -> list[Matrix]:
        last = (matrix for matrix in (self.out, self.down) if matrix is not None)
        return [*self.qkv, *self.gate_up, *last, *(() if self.mixer is None else self.mixer.inner)]

    @property
    def widths(self) -> tuple[int, int]:
        """Return the number of outputs of the product `qkv`, and that of the product `gate_up`."""
        return sum(part.outputs for part in self.qkv), sum(part.outputs for part in self.gate_up)


def num_tables(layers: Sequence[Layer]) -> int:
    """Return the number of rotation tables that the layers read."""
    return max(1, *(layer.rotation for layer in layers))


class AttentionRows:
    """The batch rows of a step for attention: each sequence has packed tokens, a context length, and the slots of its
    KV.

    Each of `sequences` is (offset, length, context, spans). The spans (slot, count) are the sequence's runs of KV slots
    from position 0 on.
    """

    def __init__(
        self,
        sequences: Sequence[tuple[int, int, int, Sequence[tuple[int, int]]]],
        num_slots: int,
        tokens_per_chunk: int,
    ) -> None:
        fields: list[int] = []
        spans: list[int] = []
        self.num_tokens = self.num_chunks = 0  # number of chunks of one key head
        for offset, length, context, places in sequences:
            require(0 < length <= context < 1 << 30 and offset == self.num_tokens, f"a row of {length} in {context}")
            fields += (offset, length, context, len(spans) // 2, self.num_chunks)
            held = 0
            for slot, count in places:
                require(slot >= 0 and count > 0 and slot + count <= num_slots, f"a span of {count} from {slot} on")
                spans += (slot, count)
                held += count
            require(held == context, f"spans hold {held} of {context} positions")
            self.num_tokens += length
            self.num_chunks += -(-length // tokens_per_chunk)
        self.num_rows = len(sequences)
        self.spans = torch.tensor(spans, dtype=torch.int64)
        self._fields = torch.tensor(fields, dtype=torch.int64).view(-1, 5)

    def table(self, kv_heads: int) -> Tensor:
        """Return int64 [rows, 5]: offset, length, context, first span and first chunk of each row. Chunks are counted
        over all key heads."""
        table = self._fields.clone()
        table[:, 4] *= kv_heads
        return table


#: Adds to the result of a part of a layer: called with the layer, the part, its outputs [T, n] and its inputs [T, m].
Between = Callable[[int, int, Tensor, Tensor], None]
#: Reads or changes the output [T, hidden] of a layer in place.
After = Callable[[int, Tensor], None]


class Layers:
    """The layers of one model with their caches, ready to be called. A layer's pool holds its keys and values, or its
    recurrent states. The pool is None for a layer without keys, values and recurrent states."""

    def __init__(
        self,
        found: Kernels,
        layers: Sequence[Layer],
        heads: Heads,
        pools: Sequence[LayerKV | MixerStates | None],
        turned: int | None = None,  # number of values of a head that are rotated
    ) -> None:
        self._found, self._heads, self._layers, self._pools = found, heads, layers, pools
        self._turned = turned or heads.dim
        self._hidden = next(last.outputs for layer in layers for last in (layer.out, layer.down) if last is not None)
        self.num_slots = next(pool.num_slots for pool in pools if isinstance(pool, LayerKV))
        self.num_tables = num_tables(layers)
        require(heads.fit(found.lanes) and len(layers) == len(pools), f"{heads} in {len(layers)} layers")
        require(0 < self._turned <= heads.dim and self._turned % 2 == 0, f"{turned} of {heads.dim} rotated")
        self._mixers: list[CMixer] = []  # kept alive, because the layers have pointers to them
        self._c = (CLayer * len(layers))(*map(self._describe, layers, pools))
        self._all = found.function("bridle_layers", POINTER(CStep), POINTER(CLayer), c_int)
        self._part = found.function("bridle_part", POINTER(CStep), POINTER(CLayer), c_int)
        inner = heads.heads * heads.dim
        self._widest = max(width for layer in layers for width in layer.widths)
        self._inner = max(inner, *(layer.out.given for layer in layers if layer.out is not None))
        self._mixed = max(inner, *(layer.mixer.num_mixed for layer in layers if layer.mixer is not None), 0)
        self._keeps = any(layer.beside == KEEPS for layer in layers)
        readers = [layer.beside for layer in layers if layer.beside != ALONE]
        require(readers[:1] in ([], [KEEPS]) and max(readers, default=0) <= READS, "a layer beside none")
        self._scratch = max(scratch_bytes(matrix, 1) for layer in layers for matrix in layer.matrices)
        self._num_states = {pool.num_slots for pool in pools if isinstance(pool, MixerStates)}

    def _describe(self, layer: Layer, pool: LayerKV | MixerStates | None) -> CLayer:
        self._check(layer)
        norms = (layer.norm, layer.last_norm, layer.mlp_norm, layer.mlp_last_norm, layer.head_norm, layer.sinks)
        places, kv = self._places(layer, pool)
        return CLayer(
            *(None if tensor is None else tensor.data_ptr() for tensor in norms),
            *places,
            self._mixer(layer, pool),
            (CMatrix * MAX_PARTS)(*(part.c for part in layer.qkv)),
            CMatrix() if layer.out is None else layer.out.c,
            (CMatrix * 2)(*(part.c for part in layer.gate_up)),
            CMatrix() if layer.down is None else layer.down.c,
            None if layer.factors is None else layer.factors.data_ptr(),
            *(len(layer.qkv), len(layer.gate_up), layer.rotation, layer.window or 0, kv),
            *(ACTIVATIONS[layer.activation], int(layer.is_norm_of_all_heads), layer.beside, int(layer.has_gate)),
            *(layer.eps, layer.mlp_eps, layer.head_eps, layer.scale, layer.softcap or 0.0, layer.share),
        )

    def _places(self, layer: Layer, pool: LayerKV | MixerStates | None) -> tuple[tuple[int | None, ...], int]:
        """Return the addresses of keys, values and scales, and the C code for the type of keys and values."""
        if not isinstance(pool, LayerKV):
            require(not layer.qkv or layer.mixer is not None, "attention without a cache")
            return (None,) * 4, 0
        require(pool.num_slots == self.num_slots, f"pools of {pool.num_slots} and {self.num_slots} slots")
        return pool.pointers(self._heads), KV_TYPES[pool.keys.dtype]

    def _mixer(self, layer: Layer, pool: LayerKV | MixerStates | None) -> Any:
        if layer.mixer is None:
            return None
        require(isinstance(pool, MixerStates), "a mixer without states")
        self._mixers.append(layer.mixer.c(pool))  # type: ignore[arg-type]
        return pointer(self._mixers[-1])

    def _check(self, layer: Layer) -> None:
        heads, hidden = self._heads, self._hidden
        inner, both = heads.heads * heads.dim, heads.heads + heads.kv_heads
        wanted = (both + heads.kv_heads) * heads.dim + layer.has_gate * inner
        if layer.mixer is not None:
            inner, wanted = layer.mixer.num_outputs, layer.mixer.num_inputs
            require(layer.mixer.num_parameters <= hidden, f"{layer.mixer.num_parameters} parameters of a state")
        gates = 0 if layer.down is None else layer.down.given
        for name, parts, inputs, outputs in (
            ("qkv", layer.qkv, hidden, wanted if layer.qkv else 0),
            ("out", [] if layer.out is None else [layer.out], inner, hidden if layer.qkv else 0),
            ("gate_up", layer.gate_up, hidden, gates if layer.activation == "relu2" else 2 * gates),
            ("down", [] if layer.down is None else [layer.down], gates, hidden if layer.gate_up else 0),
        ):
            is_right = all(part.given == inputs for part in parts) and sum(part.outputs for part in parts) == outputs
            require(is_right and len(parts) <= (2 if name == "gate_up" else MAX_PARTS), f"{name} of {outputs} outputs")
        factors = (layer.factors, layer.widths[0] or layer.widths[1])
        norms = [(norm, hidden) for norm in (layer.norm, layer.last_norm, layer.mlp_norm, layer.mlp_last_norm)]
        for tensor, size in (*norms, (layer.head_norm, both * heads.dim), (layer.sinks, heads.heads), factors):
            if tensor is not None:
                check_tensor(tensor, torch.float32, size, "a norm or sinks")
        require(0 <= layer.rotation < 1 << 10, f"table {layer.rotation} of rotations")

    @property
    def tokens_per_chunk(self) -> int:
        return self._found.queries * self._heads.kv_heads // self._heads.heads

    def advance(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        rows: AttentionRows,
        between: Between | None = None,
        after: After | None = None,
        states: StateRows | None = None,
    ) -> Tensor:
        """Compute all layers on `hidden` [T, hidden], in place, and return it; `cos` and `sin` are [tables, T, ...,
        dim], `slots` [T]. If `between` is given, it is called between the parts of a layer; if `after` is given, after
        each layer. Models with recurrent layers (mixers) need `states`."""
        heads, tokens = self._heads, hidden.shape[0]
        require(0 < tokens < _MAX_TOKENS and tokens == rows.num_tokens, f"{tokens} tokens, {rows.num_tokens} of rows")
        check_tensor(hidden, torch.float32, tokens * self._hidden, "hidden")
        for table in (cos, sin):
            check_tensor(table, torch.float32, self.num_tables * tokens * self._turned, "a rotation")
        check_tensor(slots, torch.int64, tokens, "slots")
        require(int(slots.min()) >= 0 and int(slots.max()) < self.num_slots, "a slot that the cache does not have")
        if self._num_states:
            require(states is not None and {states.num_slots} == self._num_states, "mixers without their states")
            require(states is not None and states.num_tokens == tokens, f"states of other tokens than {tokens}")
        normed, mixed = _floats(tokens, self._hidden), _floats(tokens * self._mixed)
        kept = _floats(tokens * self._hidden * self._keeps)
        wide, attended = _floats(tokens * self._widest), _floats(tokens * self._inner)
        scratch, table = torch.empty(tokens * self._scratch, dtype=torch.uint8), rows.table(heads.kv_heads)
        step = CStep(
            *(tensor.data_ptr() for tensor in (cos, sin, slots, table, rows.spans)),
            *(tensor.data_ptr() for tensor in (hidden, normed, wide, attended, mixed, kept, scratch)),
            CStateRows() if states is None else states.c,
            *(tokens, rows.num_rows, rows.num_chunks * heads.kv_heads, self._hidden),
            *(heads.heads, heads.kv_heads, heads.dim, self._turned, is_parallel()),
        )
        if between is not None:
            self._advance_in_parts(step, between, after, hidden, normed, wide, attended)
        elif after is None:
            self._all(step, self._c, len(self._layers))
        else:
            for number, c in enumerate(self._c):
                self._all(step, c, 1)
                after(number, hidden)
        return hidden

    def _advance_in_parts(
        self,
        step: CStep,
        between: Between,
        after: After | None,
        hidden: Tensor,
        normed: Tensor,
        wide: Tensor,
        attended: Tensor,
    ) -> None:
        tokens = hidden.shape[0]
        for number, (layer, c) in enumerate(zip(self._layers, self._c, strict=True)):
            # A product lies beside the rows if it is not added to them as it is.
            attends_to = hidden if layer.last_norm is None and layer.share == 1.0 else normed
            adds_to = hidden if layer.mlp_last_norm is None and layer.share == 1.0 else normed
            inner, gates = (wide[: tokens * width].view(tokens, width) for width in layer.widths)
            self._part(step, c, QKV)
            if layer.out is not None:
                between(number, QKV, inner, normed)
                self._part(step, c, ATTEND)
                between(number, ATTEND, attends_to, attended[: tokens * layer.out.given].view(tokens, -1))
            self._part(step, c, GATES)
            if layer.down is not None:
                between(number, GATES, gates, normed)
                self._part(step, c, DOWN)
                between(number, DOWN, adds_to, gates[:, : layer.down.given].contiguous())
            self._part(step, c, END)
            if after is not None:
                after(number, hidden)


def attend(
    found: Kernels,
    query: Tensor,  # [T, heads, dim]
    pool: LayerKV,
    rows: AttentionRows,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [heads]
) -> Tensor:
    """Compute attention of one layer for each token: [T, heads, dim]."""
    tokens, num_heads, dim = query.shape
    heads = Heads(num_heads, pool.keys.shape[1], dim)
    require(heads.fit(found.lanes) and tokens == rows.num_tokens, f"{heads} for {tokens} tokens")
    query = query.contiguous()
    check_tensor(query, torch.float32, tokens * num_heads * dim, "queries")
    if sinks is not None:
        sinks = sinks.detach().float().contiguous()
        check_tensor(sinks, torch.float32, num_heads, "sinks")
    out, table = _floats(tokens, num_heads, dim), rows.table(heads.kv_heads)
    call = CAttention(
        query.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        *pool.pointers(heads),
        *(tensor.data_ptr() for tensor in (table, rows.spans, out)),
        *(scale, softcap or 0.0, rows.num_rows, num_heads * dim, num_heads, heads.kv_heads, dim, window or 0),
        KV_TYPES[pool.keys.dtype],
    )
    function = found.function("bridle_attend", POINTER(CAttention), c_int, c_int)
    function(call, rows.num_chunks * heads.kv_heads, is_parallel())
    return out


def _floats(*size: int) -> Tensor:
    """Return uninitialized float32 memory. The type is explicit, because another model that is loading may change
    torch's default type for a moment."""
    return torch.empty(*size, dtype=torch.float32)
