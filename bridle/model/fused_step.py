"""Computes the lean layers of a dense model on CUDA with few launches. All operations between two matrix products, or
between a product and attention, are fused into one Triton kernel. A layer takes ten launches, including those of paged
attention. Plain torch gives the same results for the lean layers. While a model loads, the fused kernels are compared
with the lean layers, using the model's own weights. If Triton is missing or the results differ, plain torch computes
the layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from bridle.engine.scheduling.step_plan import PlanRow
from bridle.lora.adapter_kernel import missing_for_triton
from bridle.lora.fused import Machine
from bridle.model.attention import PagedAttention
from bridle.model.batch_inputs import pack_step
from bridle.model.dense_layer import DenseLayer, HeadNorm, Norm, gelu_tanh, is_close
from bridle.model.float8 import RoundedRows, float8_of
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.kernels.cpu import CpuKernel
from bridle.model.kv_cache import KVCache
from bridle.model.rope import Angles, Compute, angles_of, make_tables
from bridle.model.sequence_state import CachedRequestState

_log = logging.getLogger(__name__)

Product = Callable[[Tensor], Tensor]

#: The longest row that one program holds in registers, and the widest head.
MAX_ROW, MAX_DIM = 1 << 14, 256
#: Values of heads, and of gates, that one program computes.
HEAD_NUMBERS, GATE_NUMBERS = 1024, 1024
#: Values of a row of gates that a program rounds at once.
ROUNDED_NUMBERS = 1 << 13
#: Values of a row for each warp of a program.
_WARP_NUMBERS, _MAX_WARPS = 512, 16
_TRIAL_TOKENS, _TRIAL_PAGE = 7, 4


class FusedStep:
    """The layers of one model and the norm after the last layer, computed by fused kernels."""

    def __init__(self, layers: Sequence[DenseLayer], norm: Norm, device: torch.device) -> None:
        self._layers = layers
        self._norms = [layer.norm for layer in layers[1:]] + [norm]  # the norm that follows each layer
        self._machine = Machine(device)
        self._tables: tuple[Tensor, ...] | None = None  # cosines and sines

    @cached_property
    def kernels(self) -> Any:
        """Return the module of Triton kernels. The import takes a moment, and needs Triton."""
        from bridle.model.kernels import layer_kernels

        return layer_kernels

    def keep_angles(self, compute: Compute, num_positions: int) -> None:
        """Compute the rotary angles of `num_positions` positions in advance, if memory allows, so that steps need not
        compute them."""
        with torch.inference_mode():
            self._tables = make_tables(compute, num_positions, self._machine.device)

    def angles(self, position_ids: Tensor, compute: Compute) -> Angles:
        """Return the rotary angles of tokens at positions [1, T], from the precomputed table if there is one. For
        positions [3, 1, T], the angles are computed."""
        if self._tables is None or position_ids.dim() != 2:
            return angles_of(compute(position_ids))
        return Angles(self._tables, position_ids[0])

    def advance(self, rows: Tensor, angles: Angles, attend: PagedAttention) -> Tensor:
        """Compute all layers and the norm after them: [T, hidden] -> [T, hidden]. Keys and values go to the cache."""
        with self._machine.chosen():
            products = [layer.products for layer in self._layers]
            takers = [float8_of(qkv) is not None for qkv, *_ in products[1:]] + [False]  # of what follows each layer
            normed: Tensor | RoundedRows
            normed = self.add(rows, None, 1.0, None, self._layers[0].norm, float8_of(products[0][0]) is not None)[1]
            for layer, following, is_rounded in zip(self._layers, self._norms, takers, strict=True):
                qkv, out, gate_up, down = layer.products
                query = self.turn(layer, _multiply(qkv, normed), angles, attend)
                attended = attend.kernel.attend(query, attend.cache.layers[layer.layer_idx], layer.options)
                part = self.multiply(out, attended.view(rows.shape[0], -1))
                is_gate_rounded = float8_of(gate_up) is not None
                rows, normed = self.add(rows, part, layer.share, layer.last_norm, layer.mlp_norm, is_gate_rounded)
                part = self.gate_and_multiply(layer, _multiply(gate_up, normed), down)
                rows, normed = self.add(rows, part, layer.share, layer.mlp_last_norm, following, is_rounded)
        assert isinstance(normed, Tensor)
        return normed

    def multiply(self, product: Product, rows: Tensor) -> Tensor:
        """Multiply rows [T, n] by a linear layer. For a float8 layer, one more launch first rounds the rows to
        float8."""
        if float8_of(product) is None:
            return product(rows)
        return _multiply(product, self.add(rows, None, 1.0, None, None, True)[1])

    def gate_and_multiply(self, layer: DenseLayer, mixed: Tensor, down: Product) -> Tensor:
        """Compute the gated activation and the down projection: [T, 2 * gates] -> [T, hidden]"""
        return _multiply(down, self.gate(layer, mixed) if float8_of(down) is None else self.gate_rounded(layer, mixed))

    def add(
        self,
        rows: Tensor,
        added: Tensor | None,
        share: float,
        added_norm: Norm | None,
        norm: Norm | None,
        is_rounded: bool = False,
    ) -> tuple[Tensor, Tensor | RoundedRows]:
        """Add `added` to `rows` [T, hidden], and normalize the sum. Return the sum and the normalized rows, which are
        in float8 if `is_rounded`. If `added` and `norm` are None, both results are `rows`."""
        if added is None and norm is None and not is_rounded:
            return rows, rows
        out = rows if added is None else torch.empty_like(rows)
        normed = out if norm is None else torch.empty_like(rows)
        scales = None
        if is_rounded:
            normed = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
            scales = rows.new_empty(rows.shape[0], 1, dtype=torch.float32)
        size = rows.shape[1]
        block = _power(size)
        self.kernels.add_and_norm[(rows.shape[0],)](
            rows,
            rows if added is None else added,
            rows if added_norm is None else added_norm.weight,
            rows if norm is None else norm.weight,
            out,
            normed,
            rows if scales is None else scales,
            share,
            0.0 if added_norm is None else added_norm.eps,
            0.0 if norm is None else norm.eps,
            size=size,
            block=block,
            is_added=added is not None,
            has_added_norm=added_norm is not None,
            has_norm=norm is not None,
            is_rounded=is_rounded,
            num_warps=warps_for(block),
        )
        return out, normed if scales is None else RoundedRows(normed, scales)

    def turn(self, layer: DenseLayer, mixed: Tensor, angles: Angles, attend: PagedAttention) -> Tensor:
        """Normalize and rotate the heads in `mixed`, the query-key-value product [T, (Hq + 2 Hkv) * D]. Return queries
        [T, Hq, D]; write keys and values to the cache."""
        assert attend.step is not None
        cache, head_norm, table = attend.cache.layers[layer.layer_idx], layer.head_norm, angles.tables[layer.table]
        query = mixed.new_empty(mixed.shape[0], layer.num_heads, layer.head_dim)
        block_dim = _power(layer.head_dim)
        block_heads = max(1, HEAD_NUMBERS // block_dim)
        num_groups = -(-(layer.num_heads + 2 * layer.num_kv_heads) // block_heads)
        self.kernels.turn_and_store[(mixed.shape[0], num_groups)](
            mixed,
            mixed if head_norm is None else head_norm.weight,
            table,
            angles.places,
            table.shape[0],
            attend.step.slots,
            query,
            cache.keys,
            cache.values,
            0.0 if head_norm is None else head_norm.eps,
            stride=table.stride(0),
            num_heads=layer.num_heads,
            kv_heads=layer.num_kv_heads,
            dim=layer.head_dim,
            block_heads=block_heads,
            block_dim=block_dim,
            has_norm=head_norm is not None,
            is_norm_of_all=isinstance(head_norm, HeadNorm) and head_norm.is_of_all,
            is_rotated=layer.is_rotated,
            num_warps=4,
        )
        return query

    def gate(self, layer: DenseLayer, mixed: Tensor) -> Tensor:
        """Multiply the activated gates by the up projections: [T, 2 * gates] -> [T, gates]"""
        out = mixed.new_empty(mixed.shape[0], layer.num_gates)
        self.kernels.gate[(mixed.shape[0], -(-layer.num_gates // GATE_NUMBERS))](
            mixed, out, size=layer.num_gates, block=GATE_NUMBERS, is_gelu=layer.act is gelu_tanh, num_warps=4
        )
        return out

    def gate_rounded(self, layer: DenseLayer, mixed: Tensor) -> RoundedRows:
        """Compute the same as `gate`, with results rounded to float8."""
        out = mixed.new_empty(mixed.shape[0], layer.num_gates, dtype=torch.float8_e4m3fn)
        scales = mixed.new_empty(mixed.shape[0], 1, dtype=torch.float32)
        block = min(_power(layer.num_gates), ROUNDED_NUMBERS)
        sizes = {"size": layer.num_gates, "block": block, "is_gelu": layer.act is gelu_tanh}
        self.kernels.gate_rounded[(mixed.shape[0],)](mixed, out, scales, **sizes, num_warps=warps_for(block))
        return RoundedRows(out, scales)


def _multiply(product: Product, rows: Tensor | RoundedRows) -> Tensor:
    """Multiply rows by a linear layer. `rows` are float8 if, and only if, the layer is in float8."""
    if isinstance(rows, Tensor):
        return product(rows)
    layer = float8_of(product)
    assert layer is not None
    return layer.multiply(rows)


def try_fused_step(
    layers: Sequence[DenseLayer], norm: Norm, attention: PagedAttention, dtype: torch.dtype
) -> FusedStep | None:
    """Return a `FusedStep` for hidden states of type `dtype`; None if the kernels are unavailable or give wrong
    results. If the kernels cannot be used, the log has the reason, unless the device is a CPU."""
    device = attention.cache.device
    missing = missing_for_triton(device)
    if attention.is_plain or (missing is not None and device.type == "cpu"):
        return None
    problem = _missing(layers, attention, missing) or _find_problem(layers, norm, device, dtype)
    if problem is None:
        return FusedStep(layers, norm, device)
    _log.warning("layers on %s run in plain torch between matrix products and attention: %s", device, problem)
    return None


def warps_for(block: int) -> int:
    """Return the number of warps for a program that holds a row of `block` values."""
    return min(max(block // _WARP_NUMBERS, 1), _MAX_WARPS)


def _power(size: int) -> int:
    """Return the smallest power of two that is at least `size`, and at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def _missing(layers: Sequence[DenseLayer], attention: PagedAttention, missing: str | None) -> str | None:
    """Return the reason why the fused kernels cannot be used for these layers, or None."""
    if missing is not None:
        return f"the fused kernels need {missing}"
    for layer in layers:
        if not attention.cache.layers[layer.layer_idx].keys.dtype.is_floating_point:
            return "the fused kernels store keys and values in floating point"
        if layer.act not in (silu, gelu_tanh):
            return "the fused kernels have no such activation"
        if layer.head_dim > MAX_DIM or layer.down.out_features > MAX_ROW:
            return f"the fused kernels take heads up to {MAX_DIM} and rows up to {MAX_ROW} wide"
    return None


def _find_problem(layers: Sequence[DenseLayer], norm: Norm, device: torch.device, dtype: torch.dtype) -> str | None:
    """Test the kernels with one layer of each kind; return a description of the problem, or None."""
    for layer in {_kind(layer): layer for layer in layers}.values():
        try:
            is_right = _gives_the_same(layer, norm, device, dtype)
        except torch.OutOfMemoryError:
            raise  # the error may be temporary
        except Exception as failure:  # a compiler, its cache, a driver
            return f"the fused kernels fail: {type(failure).__name__}: {failure}"
        if not is_right:
            return f"the fused kernels differ in layer {layer.layer_idx}"
    return None


def _kind(layer: DenseLayer) -> tuple[Any, ...]:
    """Return the properties of a layer that the kernels are compiled for."""
    norms = (layer.norm, layer.last_norm, layer.mlp_norm, layer.mlp_last_norm, layer.head_norm)
    sizes = (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.num_gates)
    rounded = (float8_of(product) is not None for product in layer.products)
    return (
        *sizes,
        *rounded,
        layer.act,
        layer.is_rotated,
        *(None if norm is None else norm.weight.dtype for norm in norms),
    )


@torch.inference_mode()
def _gives_the_same(layer: DenseLayer, norm: Norm, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a layer gives the same hidden states and cache contents as a lean layer and as fused kernels.
    Attention runs in plain torch."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_TRIAL_TOKENS, layer.down.out_features, generator=generator).to(device, dtype)
    angles = torch.rand(_TRIAL_TOKENS, 1, layer.head_dim // 2, generator=generator) * 6.0
    cos, sin = (torch.cat(pair, -1).to(device, dtype) for pair in ((angles.cos(),) * 2, (-angles.sin(), angles.sin())))
    turns = [(cos, sin)] * (layer.table + 1)
    shape = LayerGeometry(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.head_dim)
    ways = []
    for is_fused in (False, True):
        cache = KVCache(Geometry({layer.layer_idx: shape}, 1), 3, _TRIAL_PAGE, dtype, device)
        cache.clear(3)
        attend = _attention_over(cache)
        if is_fused:
            out = FusedStep([layer], norm, device).advance(rows, angles_of(turns), attend)
        else:
            out = norm(layer.advance(rows, turns[0], attend))
        ways.append((out, *cache.layers[layer.layer_idx].parts))
    return all(is_close(want, have) for want, have in zip(*ways, strict=True))


def _attention_over(cache: KVCache) -> PagedAttention:
    """Return the attention handler of a step with one sequence whose blocks are scattered over the KV cache `cache`."""
    mirror = CachedRequestState()
    mirror.tokens = [0] * _TRIAL_TOKENS
    mirror.add_blocks((2, 0))
    attention = PagedAttention(cache, CpuKernel())
    attention.step = pack_step([PlanRow(0, 0, _TRIAL_TOKENS)], [mirror], _TRIAL_PAGE, cache.device)
    attention.kernel.begin(attention.step)
    return attention
