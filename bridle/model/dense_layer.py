"""A leaner form of the decoder layer that most dense families share, put in place of the library's own.

On a CPU a small model spends more time in the library's modules than in arithmetic. Here queries, keys and values are
one product, gate and up another, the rotation is three operations for all heads, and nothing passes through a
dozen module calls. Each layer is replaced only after both forms gave the same result on the same input; layers of
any other make stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from bridle.model.forward_context import (
    AttentionHandler,
    AttentionOptions,
    attention_handler,
    current_handler,
)
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.linear import as_function
from bridle.model.quantize import Int8Linear
from bridle.native.linear import QuantizedLinear

#: Families whose layers have this form. A layer that computes something else would fail the comparison.
DENSE_FAMILIES = frozenset({"llama", "mistral", "ministral", "qwen2", "qwen3", "seed_oss", "smollm3"})
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_NUM_TRIAL_TOKENS = 6

#: Cosines and sines [T, 1, D], the first half of the sines negated: rotating is `x * cos + roll(x) * sin`.
Rotation = tuple[Tensor, Tensor]


class DenseLayer(nn.Module):
    """RMS norm, attention with rotary positions, RMS norm, gated MLP; two residuals."""

    def __init__(self, layer: Any, shape: LayerGeometry) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.qkv = _join(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = attention.o_proj
        self.gate_up = _join(mlp.gate_proj, mlp.up_proj)
        self.down = mlp.down_proj
        self.num_gates = mlp.gate_proj.out_features
        self.act = _activation(mlp.act_fn)
        self.norm = Norm(layer.input_layernorm)
        self.mlp_norm = Norm(layer.post_attention_layernorm)
        self.head_norm = _head_norm(attention, self.num_heads, self.num_kv_heads)
        self.is_rotated = bool(getattr(attention, "use_rope", True))
        self.options = AttentionOptions(float(attention.scaling), shape.window)
        self._rotated = self.num_heads + self.num_kv_heads

    def bind(self) -> None:
        """Use the linear layers that are in place now: later replacements have no effect."""
        self._qkv, self._out = as_function(self.qkv), as_function(self.out)
        self._gate_up, self._down = as_function(self.gate_up), as_function(self.down)

    def forward(
        self,
        hidden_states: Tensor,  # [1, T, hidden]
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **unused: Any,
    ) -> Tensor:
        """As the library calls its layers: [1, T, hidden] -> [1, T, hidden]"""
        assert position_embeddings is not None
        self.bind()
        return self.advance(hidden_states[0], rotation(*position_embeddings), current_handler()).unsqueeze(0)

    def advance(self, rows: Tensor, turn: Rotation, attend: AttentionHandler) -> Tensor:
        """[T, hidden] -> [T, hidden], after `bind`."""
        heads = self._qkv(self.norm(rows)).view(rows.shape[0], -1, self.head_dim)  # [T, Hq + 2 Hkv, D]
        turned, value = heads[:, : self._rotated], heads[:, self._rotated :]
        if self.head_norm is not None:
            turned = self.head_norm(turned)
        if self.is_rotated:
            turned = torch.addcmul(turned * turn[0], turned.roll(self.head_dim // 2, -1), turn[1])
        query, key = turned[:, : self.num_heads], turned[:, self.num_heads :]
        attended = attend(self, query, key, value, self.options, {})  # [T, Hq, D]
        rows = rows + self._out(attended.view(rows.shape[0], -1))
        mixed = self._gate_up(self.mlp_norm(rows))
        gates = self.act(mixed[:, : self.num_gates]).mul_(mixed[:, self.num_gates :])
        return self._down(gates).add_(rows)


class Norm:
    """RMS norm in float32, its weight applied in the model's own type."""

    def __init__(self, norm: Any) -> None:
        self.weight: Tensor = norm.weight
        self.eps = float(norm.variance_epsilon)

    def __call__(self, rows: Tensor) -> Tensor:
        if rows.dtype is not torch.float32:
            wide = rows.float()
            return self.weight * (wide * _inverse_rms(wide, self.eps)).to(rows.dtype)
        return (rows * _inverse_rms(rows, self.eps)).mul_(self.weight)


def rotation(cos: Tensor, sin: Tensor) -> Rotation:
    """The library's tables [1, T, D], ready for use in all layers."""
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
    return cos[0].unsqueeze(1), signed.unsqueeze(1)


def lower_layers(model: Any, geometry: Geometry) -> int:
    """Replace the decoder layers of a dense family that the lean form computes equally; gives their number.

    The model keeps its other parts. A layer is freed as soon as its replacement is proven.
    """
    if model.config.model_type not in DENSE_FAMILIES:
        return 0
    layers = model.model.layers
    for number in range(len(layers)):
        lean = _try_lower(model, layers[number], geometry)
        if lean is None:
            return number
        layers[number] = lean
    return len(layers)


def _try_lower(model: Any, layer: Any, geometry: Geometry) -> DenseLayer | None:
    try:
        lean = DenseLayer(layer, geometry.layers[layer.self_attn.layer_idx])
    except (AttributeError, TypeError):
        return None  # the layer lacks a part, or has another one in its place
    parameter = next(layer.parameters())
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, _NUM_TRIAL_TOKENS, model.config.hidden_size, generator=generator).to(parameter)
    positions = torch.arange(_NUM_TRIAL_TOKENS, device=parameter.device).unsqueeze(0)
    with torch.inference_mode(), attention_handler(attend_causally):
        embeddings = model.model.rotary_emb(rows, position_ids=positions)
        want = layer(rows, position_embeddings=embeddings, position_ids=positions, attention_mask=None)
        try:
            have = lean(rows, position_embeddings=embeddings)
        except RuntimeError:
            return None  # the shapes fit by chance, as with partial rotation
    return lean if is_close(want, have) else None


def is_close(want: Tensor, have: Tensor) -> bool:
    """Whether two results differ by rounding only."""
    limit = TOLERANCES.get(want.dtype, 5e-2) * max(1.0, float(want.abs().max()))
    return float((want - have).abs().max()) <= limit


def attend_causally(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    extra: dict[str, Any],
) -> Tensor:
    """A handler for trials: one sequence, no cache. Its scale depends on the window, so that a window that was left out
    shows."""
    query, key, value = (heads.transpose(0, 1).unsqueeze(0) for heads in (query, key, value))
    out = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=options.scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    rows = out[0].transpose(0, 1).contiguous()  # [T, Hq, D]
    return rows * (1.0 + 1.0 / (options.window or 1))


def _inverse_rms(rows: Tensor, eps: float) -> Tensor:
    """[..., n] -> [..., 1]"""
    return (rows * rows).mean(-1, keepdim=True).add_(eps).rsqrt_()


def _activation(module: nn.Module) -> Any:
    """The activation, without a module call where it is the usual one."""
    return silu if type(module).__name__ in ("SiLU", "SiLUActivation") else module


def _head_norm(attention: Any, num_heads: int, num_kv_heads: int) -> Norm | None:
    """One norm for query and key heads together, where a family has them; its weight is [Hq + Hkv, D]."""
    if getattr(attention, "q_norm", None) is None:
        return None
    norm = Norm(attention.q_norm)
    weights = [attention.q_norm.weight] * num_heads + [attention.k_norm.weight] * num_kv_heads
    norm.weight = torch.stack([weight.detach() for weight in weights])
    return norm


class Joined(nn.Module):
    """Several layers of one input that cannot be one product; each is computed by itself."""

    def __init__(self, linears: Sequence[Any]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(linears)
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return torch.cat([part(rows) for part in self.parts], -1)


def _join(*linears: Any) -> nn.Module:
    """One layer that gives the outputs of several, side by side."""
    if any(isinstance(linear, (QuantizedLinear, Int8Linear)) for linear in linears):
        return _join_quantized(linears)
    weight = torch.cat([linear.weight.detach() for linear in linears])
    with torch.device("meta"):
        joined = nn.Linear(weight.shape[1], weight.shape[0], bias=linears[0].bias is not None)
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if linears[0].bias is not None:
        joined.bias = nn.Parameter(_join_biases(linears), requires_grad=False)
    return joined


def _join_quantized(linears: Sequence[Any]) -> nn.Module:
    """One quantized product of those that have the same form, otherwise, or if the kernels have them already, each by
    itself."""
    has_kernels = any(isinstance(linear, QuantizedLinear) and linear.native is not None for linear in linears)
    if has_kernels or len({(type(linear), getattr(linear, "kind", None)) for linear in linears}) > 1:
        return Joined(linears)
    bias = None if linears[0].bias is None else _join_biases(linears)
    if isinstance(linears[0], Int8Linear):
        integers, scales = zip(*(linear.integers() for linear in linears), strict=True)
        return Int8Linear.from_integers(torch.cat(integers), torch.cat(scales), bias, linears[0].dtype)
    blocks = torch.cat([linear.blocks for linear in linears])
    shape = (sum(linear.out_features for linear in linears), linears[0].in_features)
    return QuantizedLinear(linears[0].kind, blocks, shape, bias, linears[0].dtype)


def _join_biases(linears: Sequence[Any]) -> Tensor:
    return torch.cat([linear.bias.detach() for linear in linears])
