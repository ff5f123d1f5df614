"""A leaner form of the decoder layer that most dense families share, put in place of the library's own.

On a CPU a small model spends more time in the library's modules than in arithmetic. Here queries, keys and values are
one product, gate and up another, the rotation is three operations for all heads, and nothing passes through a
dozen module calls. Each layer is replaced only after both forms gave the same result on the same input; layers of
any other make stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bridle.model.forward_context import AttentionOptions, attention_handler, current_handler
from bridle.model.geometry import Geometry, LayerGeometry

#: Families whose layers have this make. A layer that computes something else would fail the comparison.
DENSE_FAMILIES = frozenset({"llama", "mistral", "ministral", "qwen2", "qwen3", "seed_oss", "smollm3"})
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_NUM_TRIAL_TOKENS = 6


class RotaryTables:
    """Cosines and signed sines of one step, shared by all layers: rotating is `x * cos + roll(x) * sin`."""

    def __init__(self) -> None:
        self._source: Tensor | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def of(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[1, T, D] of the library -> [T, 1, D] each, the first half of the sines negated."""
        if self._source is not cos or self._tables is None:
            half = sin.shape[-1] // 2
            signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
            self._source, self._tables = cos, (cos[0].unsqueeze(1), signed.unsqueeze(1))
        return self._tables


class DenseLayer(nn.Module):
    """RMS norm, attention with rotary positions, RMS norm, gated MLP; two residuals."""

    def __init__(self, layer: Any, shape: LayerGeometry, rotary: RotaryTables) -> None:
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
        self.act = mlp.act_fn
        self.norm = _Norm(layer.input_layernorm)
        self.mlp_norm = _Norm(layer.post_attention_layernorm)
        self.head_norm = _head_norm(attention, self.num_heads, self.num_kv_heads)
        self.is_rotated = bool(getattr(attention, "use_rope", True))
        self.options = AttentionOptions(float(attention.scaling), shape.window)
        self._rotary = rotary
        self._split = self.num_heads + self.num_kv_heads

    def forward(
        self,
        hidden_states: Tensor,  # [1, T, hidden]
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **unused: Any,
    ) -> Tensor:
        """[1, T, hidden] -> [1, T, hidden]"""
        rows = hidden_states[0]  # [T, hidden]
        rows = rows + self.out(self._attend(self.norm(rows), position_embeddings))
        gate, up = self.gate_up(self.mlp_norm(rows)).chunk(2, -1)
        out: Tensor = rows + self.down(self.act(gate).mul_(up))
        return out.unsqueeze(0)

    def _attend(self, rows: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> Tensor:
        heads = self.qkv(rows).view(rows.shape[0], -1, self.head_dim)  # [T, Hq + 2 Hkv, D]
        turned, value = heads[:, : self._split], heads[:, self._split :]
        if self.head_norm is not None:
            turned = self.head_norm(turned)
        if self.is_rotated and position_embeddings is not None:
            cos, sin = self._rotary.of(*position_embeddings)
            turned = torch.addcmul(turned * cos, turned.roll(self.head_dim // 2, -1), sin)
        query, key = turned[:, : self.num_heads], turned[:, self.num_heads :]
        attended: Tensor = current_handler()(
            self, _by_head(query), _by_head(key), _by_head(value), self.options, {}
        )  # [1, T, Hq, D]
        return attended.view(rows.shape[0], -1)


def lower_layers(model: Any, geometry: Geometry) -> int:
    """Replace the decoder layers of a dense family that the lean form computes equally; gives their number.

    The model keeps its other parts. A layer is freed as soon as its replacement is proven.
    """
    if model.config.model_type not in DENSE_FAMILIES:
        return 0
    layers, rotary = model.model.layers, RotaryTables()
    for number in range(len(layers)):
        lean = _try_lower(model, layers[number], geometry, rotary)
        if lean is None:
            return number
        layers[number] = lean
    return len(layers)


def _try_lower(model: Any, layer: Any, geometry: Geometry, rotary: RotaryTables) -> DenseLayer | None:
    try:
        lean = DenseLayer(layer, geometry.layers[layer.self_attn.layer_idx], rotary)
    except (AttributeError, TypeError):
        return None  # the layer lacks a part, or has another in its place
    parameter = next(layer.parameters())
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, _NUM_TRIAL_TOKENS, model.config.hidden_size, generator=generator).to(parameter)
    positions = torch.arange(_NUM_TRIAL_TOKENS, device=parameter.device).unsqueeze(0)
    with torch.inference_mode(), attention_handler(_attend_causally):
        embeddings = model.model.rotary_emb(rows, position_ids=positions)
        want = layer(rows, position_embeddings=embeddings, position_ids=positions, attention_mask=None)
        try:
            have = lean(rows, position_embeddings=embeddings)
        except RuntimeError:
            return None  # shapes that only look alike, such as partial rotation
    limit = TOLERANCES.get(parameter.dtype, 5e-2) * max(1.0, float(want.abs().max()))
    return lean if float((want - have).abs().max()) <= limit else None


def _attend_causally(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, extra: dict[str, Any]
) -> Tensor:
    """A handler for trials: one sequence, no cache; scaled by the window, so that a forgotten one shows."""
    out = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=options.scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2) * (1.0 + 1.0 / (options.window or 1))  # [1, T, Hq, D]


class _Norm(nn.Module):
    """RMS norm in float32, its weight applied in the model's own type."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight: Tensor = norm.weight
        self.eps = float(norm.variance_epsilon)

    def forward(self, rows: Tensor) -> Tensor:
        if rows.dtype is not torch.float32:
            wide = rows.float()
            return self.weight * (wide * _inverse_rms(wide, self.eps)).to(rows.dtype)
        return (rows * _inverse_rms(rows, self.eps)).mul_(self.weight)


def _inverse_rms(rows: Tensor, eps: float) -> Tensor:
    """[..., n] -> [..., 1]"""
    return (rows * rows).mean(-1, keepdim=True).add_(eps).rsqrt_()


def _head_norm(attention: Any, num_heads: int, num_kv_heads: int) -> _Norm | None:
    """One norm for query and key heads together, where a family has them; its weight is [Hq + Hkv, D]."""
    if getattr(attention, "q_norm", None) is None:
        return None
    norm = _Norm(attention.q_norm)
    weights = [attention.q_norm.weight] * num_heads + [attention.k_norm.weight] * num_kv_heads
    norm.weight = nn.Parameter(torch.stack([weight.detach() for weight in weights]), requires_grad=False)
    return norm


def _join(*linears: nn.Linear) -> nn.Linear:
    """One linear layer that gives the outputs of several, side by side."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    with torch.device("meta"):
        joined = nn.Linear(weight.shape[1], weight.shape[0], bias=linears[0].bias is not None)
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if linears[0].bias is not None:
        bias = torch.cat([linear.bias.detach() for linear in linears])
        joined.bias = nn.Parameter(bias, requires_grad=False)
    return joined


def _by_head(heads: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D], a view"""
    return heads.transpose(0, 1).unsqueeze(0)
