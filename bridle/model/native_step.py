"""Computes all layers of a model in one call of the C kernels, if the kernels support every part of the layers.

Prompts and decode steps are computed in the same way, so that a token's result does not depend on the other tokens in
its step. In a step with adapters, layers are computed part by part, and adapters add their results between the parts.
Rows without an adapter have the same bits as in a step without adapters. The lean layers compute the same in torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from bridle.cpu_kernels.kernels import Kernels, Matrix
from bridle.cpu_kernels.layers import KV_TYPES, Heads, Layer, LayerKV, Layers, num_tables
from bridle.cpu_kernels.library import kernels
from bridle.cpu_kernels.linear import NativeWeight, are_in_floats
from bridle.cpu_kernels.mixers import MixerStates, StateRows, StateSpan
from bridle.model.batch_inputs import PackedStep
from bridle.model.dense_layer import DenseLayer, HeadNorm, Norm, Rotation, gelu_tanh
from bridle.model.kernels.native import native_rows
from bridle.model.kv_cache import KVCache
from bridle.model.layer_taps import LayerTap
from bridle.model.rope import POSITIONS, Compute, fits_memory
from bridle.model.state_pool import StatePool

#: The linear layers of each product of a layer: queries, keys and values, or a mixer's inputs; out; gates and up; down.
Parts = tuple[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]]

_ACTIVATIONS = {silu: "silu", gelu_tanh: "gelu_tanh"}


class NativeStep:
    """The layers of one model as the C kernels compute them. `numbers` are the layer numbers under which the caches
    store keys, values and states. `parts` has the linear layers of each layer's four products."""

    def __init__(
        self,
        found: Kernels,
        numbers: Sequence[int],
        parts: Sequence[Parts],
        described: Sequence[Layer],
        heads: Heads,
        turned: int | None = None,
    ) -> None:
        self._found, self.described, self._heads, self._turned = found, list(described), heads, turned
        self._numbers, self._parts = list(numbers), list(parts)
        self._num_tables = num_tables(described)
        self._first_kv = next(at for at, layer in enumerate(described) if layer.qkv and layer.mixer is None)
        # The attributes of each module itself, collected once, because every step checks them and there are many
        # modules.
        self._states = [vars(module) for layer in parts for part in layer for module in part]
        self._ready: tuple[KVCache, StatePool | None, Layers] | None = None
        self.angles: Rotation | None = None  # of all positions, [tables, P, D], of which the first are known
        self._num_known = 0

    def keep_angles(self, compute: Compute, num_positions: int) -> None:
        """Cache the rotary angles of up to `num_positions` positions, if memory allows, so that each angle is computed
        once. Most requests are short, so the angles of a position are computed, and take memory, only when a step
        reaches that position."""
        with torch.inference_mode():
            if fits_memory(compute, num_positions):
                cos, sin = self._rotations(compute(torch.zeros(1, 1, dtype=torch.long)))
                shape = (cos.shape[0], num_positions, cos.shape[2])
                self.angles, self._num_known = (cos.new_empty(shape), sin.new_empty(shape)), 0
                self._know(compute, 0)

    def _know(self, compute: Compute, position: int) -> None:
        """Cache the angles of all positions up to `position`. Angles are computed in pieces of positions, whose bounds
        are always the same."""
        assert self.angles is not None
        num_positions = self.angles[0].shape[1]
        while self._num_known <= min(position, num_positions - 1):
            begin, end = self._num_known, min(self._num_known + POSITIONS, num_positions)
            piece = self._rotations(compute(torch.arange(begin, end).unsqueeze(0)))
            for kept, made in zip(self.angles, piece, strict=True):
                kept[:, begin:end] = made
            self._num_known = end

    def _turns(self, compute: Compute, position_ids: Tensor) -> Rotation:
        """Return the cosines and sines of tokens at positions [1, T] or [3, 1, T], as two tensors [tables, T, D]."""
        if self.angles is None or position_ids.dim() != 2:
            return self._rotations(compute(position_ids))
        cos, sin = self.angles
        if self._num_known < cos.shape[1]:
            self._know(compute, int(position_ids.max()))
        return cos.index_select(1, position_ids[0]), sin.index_select(1, position_ids[0])

    def _rotations(self, turns: Sequence[Rotation]) -> Rotation:
        parts = [[turn[i].flatten(1) for turn in turns[: self._num_tables]] for i in (0, 1)]
        return torch.stack(parts[0]), torch.stack(parts[1])

    @contextmanager
    def first_layers(self) -> Iterator[Sequence[int]]:
        """In this `with` block, compute only the first layer of each kind. A pass over one layer of each kind takes as
        much memory as a full pass, but less time. Yields the numbers of the computed layers."""
        whole = self.described, self._numbers, self._parts
        kinds = {_kind(layer): number for number, layer in reversed([*enumerate(self.described)])}
        few = sorted(kinds.values())
        self.described = [self.described[number] for number in few]
        self._parts = [self._parts[number] for number in few]
        self._numbers = [self._numbers[number] for number in few]
        self._ready = None
        try:
            yield self._numbers
        finally:
            self.described, self._numbers, self._parts = whole
            self._ready = None

    def fits(self, cache: KVCache) -> bool:
        """Return whether the kernels can compute a step: they support the cache's type, and only adapters have replaced
        `forward` of any layer."""
        is_free = all("adapt" in state for state in self._states if "forward" in state)
        return is_free and cache.layers[self._numbers[self._first_kv]].keys.dtype in KV_TYPES

    def advance(
        self,
        hidden: Tensor,
        position_ids: Tensor,
        compute: Compute,
        cache: KVCache,
        step: PackedStep,
        tap: LayerTap | None = None,
        states: StatePool | None = None,
    ) -> Tensor:
        """Compute all layers: [T, hidden] -> [T, hidden]. Keys and values are written to `cache`, and recurrent states
        to `states`. `compute` computes the rotary angles that are not cached yet."""
        layers = self._over(cache, states)
        rows = native_rows(step, layers.num_slots, layers.tokens_per_chunk)
        cos, sin = self._turns(compute, position_ids)
        between = self._adapt if any("adapt" in state for state in self._states) else None
        spans = None if states is None else StateRows(_spans(step), states.num_slots)
        return layers.advance(hidden, cos, sin, step.slots, rows, between, tap, spans)

    def _adapt(self, layer: int, part: int, out: Tensor, rows: Tensor) -> None:
        """Let adapters add their results to `out`, the result of one product of a layer."""
        end = 0
        for module in self._parts[layer][part]:
            begin, end = end, end + module.out_features
            add = vars(module).get("adapt")
            if add is not None:
                add(out[:, begin:end], rows)

    def _over(self, cache: KVCache, states: StatePool | None) -> Layers:
        if self._ready is None or self._ready[0] is not cache or self._ready[1] is not states:
            pools = [self._pool(*each, cache, states) for each in zip(self._numbers, self.described, strict=True)]
            layers = Layers(self._found, self.described, self._heads, pools, self._turned)
            self._ready = (cache, states, layers)
        return self._ready[2]

    def _pool(
        self, number: int, layer: Layer, cache: KVCache, states: StatePool | None
    ) -> LayerKV | MixerStates | None:
        if layer.mixer is None:
            return cache.layers[number].pool if layer.qkv else None
        assert states is not None
        own = states.layers[number]
        return MixerStates(own["conv", 0], own.get(("recurrent", 0)))


def _spans(step: PackedStep) -> Iterator[StateSpan]:
    for row in step.rows:
        for length, is_fresh, slots in row.pieces():
            yield length, is_fresh, row.state, slots


def try_native_step(layers: Sequence[DenseLayer]) -> NativeStep | None:
    """Return an object that computes the layers in one call; None if the kernels do not support a part of a layer."""
    found = kernels()
    if found is None or are_in_floats():
        return None
    first = layers[0]
    heads = Heads(first.num_heads, first.num_kv_heads, first.head_dim)
    described = [_describe(layer) for layer in layers]
    if not heads.fit(found.lanes) or any(_sizes(layer) != _sizes(first) for layer in layers):
        return None
    whole = [one for one in described if one is not None]
    if len(whole) < len(layers):
        return None
    parts: list[Parts] = [([layer.qkv], [layer.out], [layer.gate_up], [layer.down]) for layer in layers]
    return NativeStep(found, [layer.layer_idx for layer in layers], parts, whole, heads)


def _sizes(layer: DenseLayer) -> tuple[int, int, int, int]:
    return layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.num_gates


def _describe(layer: DenseLayer) -> Layer | None:
    qkv, out, gate_up, down = map(_matrices, (layer.qkv, layer.out, layer.gate_up, layer.down))
    norms = [layer.norm, layer.last_norm, layer.mlp_norm, layer.mlp_last_norm, layer.head_norm]
    is_float = all(norm is None or norm.weight.dtype is torch.float32 for norm in norms)
    if not (qkv and gate_up and len(out) == len(down) == 1 and is_float and layer.act in _ACTIVATIONS):
        return None
    if not _have_one_eps(layer.norm, layer.last_norm) or not _have_one_eps(layer.mlp_norm, layer.mlp_last_norm):
        return None
    head_norm = layer.head_norm
    return Layer(
        norm=_weight(layer.norm),
        last_norm=_weight(layer.last_norm),
        mlp_norm=_weight(layer.mlp_norm),
        mlp_last_norm=_weight(layer.mlp_last_norm),
        head_norm=_weight(head_norm),
        is_norm_of_all_heads=isinstance(head_norm, HeadNorm) and head_norm.is_of_all,
        qkv=qkv,
        out=out[0],
        gate_up=gate_up,
        down=down[0],
        activation=_ACTIVATIONS[layer.act],
        eps=_eps(layer.norm, layer.last_norm),
        mlp_eps=_eps(layer.mlp_norm, layer.mlp_last_norm),
        head_eps=_eps(head_norm),
        share=layer.share,
        rotation=layer.table + 1 if layer.is_rotated else 0,
        scale=layer.options.scaling,
        window=layer.options.window,
        softcap=layer.options.softcap,
        sinks=layer.options.sinks,
    )


def _kind(layer: Layer) -> tuple[Any, ...]:
    """Return the properties of a layer that determine how much memory its computation takes."""
    return layer.window, *((matrix.kind, matrix.outputs, matrix.inputs) for matrix in layer.matrices)


def _weight(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight.detach().contiguous()


def _eps(*norms: Norm | None) -> float:
    return next((norm.eps for norm in norms if norm is not None), 0.0)


def _have_one_eps(*norms: Norm | None) -> bool:
    return len({norm.eps for norm in norms if norm is not None}) <= 1


def _matrices(module: Any) -> list[Matrix]:
    """Return the packed matrices of a linear layer or its parts, in order; an empty list if a part is not packed."""
    parts: list[nn.Module] = list(module.parts) if hasattr(module, "parts") else [module]
    weights = [getattr(part, "native", None) for part in parts]
    return [weight.matrix for weight in weights if isinstance(weight, NativeWeight)] if all(weights) else []
