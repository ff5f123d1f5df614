"""Computes all layers of a dense model in one call of the native kernels, if every product of theirs is quantized.

It is used for every step without adapters, prompts and single tokens alike, so that a token's numbers do not depend on
what else is in its step. The lean layers compute the same in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from bridle.model.dense_layer import DenseLayer, Rotation
from bridle.model.kv_cache import KVCache
from bridle.model.packing import PackedStep
from bridle.native.kernels import Kernels, Matrix
from bridle.native.layers import Heads, Layer, Layers, Rows
from bridle.native.library import kernels
from bridle.native.linear import NativeWeight


class NativeStep:
    """The layers of one model. `fits` says whether a step can be computed this way."""

    def __init__(self, found: Kernels, layers: Sequence[DenseLayer], described: Sequence[Layer], heads: Heads) -> None:
        self._found, self._described, self._heads = found, described, heads
        self._numbers = [layer.layer_idx for layer in layers]
        self._modules = [m for layer in layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        self._ready: tuple[KVCache, Layers] | None = None

    def fits(self, cache: KVCache) -> bool:
        """Whether the kernels can read the cache, and no adapter computes in a layer's place."""
        layer = cache.layers[self._numbers[0]]
        return layer.keys.dtype is torch.float32 and not any("forward" in vars(module) for module in self._modules)

    def advance(self, hidden: Tensor, turn: Rotation, cache: KVCache, step: PackedStep) -> Tensor:
        """[T, hidden] -> [T, hidden]; keys and values go to the cache."""
        layers = self._over(cache)
        sequences = [(row.offset, row.length, row.context, row.spans) for row in step.rows]
        rows = Rows(sequences, layers.num_slots, layers.tokens_per_chunk)
        return layers.advance(hidden, turn[0].contiguous(), turn[1].contiguous(), step.slots, rows)

    def _over(self, cache: KVCache) -> Layers:
        if self._ready is None or self._ready[0] is not cache:
            pools = [(cache.layers[number].keys, cache.layers[number].values) for number in self._numbers]
            self._ready = (cache, Layers(self._found, self._described, self._heads, pools))
        return self._ready[1]


def try_native_step(layers: Sequence[DenseLayer]) -> NativeStep | None:
    """The layers as one call; None if the kernels cannot compute a part of them."""
    found = kernels()
    if found is None:
        return None
    first = layers[0]
    heads = Heads(first.num_heads, first.num_kv_heads, first.head_dim)
    described = [_describe(layer) for layer in layers]
    if not heads.fit(found.lanes) or any(_sizes(layer) != _sizes(first) for layer in layers):
        return None
    whole = [one for one in described if one is not None]
    return NativeStep(found, layers, whole, heads) if len(whole) == len(layers) else None


def _sizes(layer: DenseLayer) -> tuple[int, int, int]:
    return layer.num_heads, layer.num_kv_heads, layer.head_dim


def _describe(layer: DenseLayer) -> Layer | None:
    qkv, out, gate_up, down = map(_matrices, (layer.qkv, layer.out, layer.gate_up, layer.down))
    norms = [layer.norm.weight, layer.mlp_norm.weight]
    norms += [layer.head_norm.weight] if layer.head_norm is not None else []
    is_plain = layer.act is silu and all(weight.dtype is torch.float32 for weight in norms)
    if not (qkv and gate_up and len(out) == len(down) == 1 and is_plain):
        return None
    return Layer(
        norm=layer.norm.weight.detach().contiguous(),
        mlp_norm=layer.mlp_norm.weight.detach().contiguous(),
        head_norm=None if layer.head_norm is None else layer.head_norm.weight.detach().contiguous(),
        qkv=qkv,
        out=out[0],
        gate_up=gate_up,
        down=down[0],
        eps=layer.norm.eps,
        mlp_eps=layer.mlp_norm.eps,
        head_eps=0.0 if layer.head_norm is None else layer.head_norm.eps,
        scale=layer.options.scaling,
        window=layer.options.window,
        is_rotated=layer.is_rotated,
    )


def _matrices(module: Any) -> list[Matrix]:
    """The packed matrices of a layer, one after the other; none if a part of it is not packed."""
    parts: list[nn.Module] = list(module.parts) if hasattr(module, "parts") else [module]
    weights = [getattr(part, "native", None) for part in parts]
    return [weight.matrix for weight in weights if isinstance(weight, NativeWeight)] if all(weights) else []
