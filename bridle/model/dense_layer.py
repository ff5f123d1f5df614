"""A leaner form of the decoder layer that most dense families share. The lean form replaces the layer of transformers.
On a CPU, a small model spends more time in Python code of transformers than in arithmetic. The lean form computes the
query, key and value projections as one product, and the gate and up projections as another product. The lean form
rotates all heads in three operations, and calls no nested modules. A layer is replaced only if both forms give the same
result on the same input. Layers of other kinds are unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from bridle.cpu_kernels.linear import QuantizedLinear, in_floats, join
from bridle.model.float8 import Float8Linear
from bridle.model.forward_context import AttentionHandler, AttentionOptions, attention_handler, current_handler
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.linear import as_function
from bridle.model.quantization.code_linear import CodeLinear
from bridle.model.quantize import Int8Linear
from bridle.model.tensor_parallel import share_of, shared

#: Families whose layers have this form. A layer that computes something else would fail the comparison.
DENSE_FAMILIES = frozenset(
    {
        *("gemma", "gemma2", "gemma3_text", "granite", "llama", "ministral", "mistral", "olmo2", "olmo3", "phi3"),
        *("qwen2", "qwen3", "seed_oss", "smollm3"),
    }
)
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_NUM_TRIAL_TOKENS = 6

#: Cosines and sines [T, 1, D]. The first half of the sines is negated, so that the rotation is `x * cos + roll(x) *
#: sin`.
Rotation = tuple[Tensor, Tensor]

gelu_tanh = partial(gelu, approximate="tanh")


class DenseLayer(nn.Module):
    """A decoder layer: attention with rotary positions and a gated MLP, each with a residual connection. RMS norms are
    before attention and MLP, after them (`last_norm`, `mlp_last_norm`), or both. The outputs of attention and MLP are
    multiplied by `share` before they are added to the hidden states."""

    def __init__(self, layer: Any, shape: LayerGeometry) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.num_heads, self.num_kv_heads = shape.num_heads, shape.num_kv_heads
        self.attention_parts, self.qkv = _take(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
        self.out = attention.o_proj
        self.mlp_parts, self.gate_up = _take(mlp, "gate_up_proj", ("gate_proj", "up_proj"))
        self.down = mlp.down_proj
        self.num_gates: int = mlp.down_proj.in_features
        self.act = _activation(getattr(mlp, "act_fn", None) or mlp.activation_fn)
        self.norm, self.last_norm, self.mlp_norm, self.mlp_last_norm = map(_norm, _norms_of(layer))
        self.head_norm = _head_norm(attention, self.num_heads, self.num_kv_heads)
        self.share = float(getattr(layer, "residual_multiplier", 1.0))
        self.is_rotated = bool(getattr(attention, "use_rope", True))
        self.table = 0  # index of the rotation table that this layer uses
        softcap = getattr(attention, "attn_logit_softcapping", None)
        self.options = AttentionOptions(float(attention.scaling), shape.window, softcap)
        self._rotated = self.num_heads + self.num_kv_heads

    def bind(self) -> None:
        """Store the functions of the module's current linear layers. Replacing a linear layer later has no effect on
        `advance`."""
        self._qkv, self._out = as_function(self.qkv), as_function(self.out)
        self._gate_up, self._down = as_function(self.gate_up), as_function(self.down)

    @property
    def products(self) -> tuple[Callable[[Tensor], Tensor], ...]:
        """Return the functions that `bind` stored: query-key-value, output, gate-up and down projections."""
        return self._qkv, self._out, self._gate_up, self._down

    def forward(
        self,
        hidden_states: Tensor,  # [1, T, hidden]
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **unused: Any,
    ) -> Tensor:
        """Compute the layer with the signature that transformers uses: [1, T, hidden] -> [1, T, hidden]"""
        assert position_embeddings is not None
        self.bind()
        return self.advance(hidden_states[0], rotation(*position_embeddings), current_handler()).unsqueeze(0)

    def advance(self, rows: Tensor, turn: Rotation, attend: AttentionHandler) -> Tensor:
        """Compute the layer: [T, hidden] -> [T, hidden]. `bind` must have been called."""
        normed = rows if self.norm is None else self.norm(rows)
        heads = self._qkv(normed).view(rows.shape[0], -1, self.head_dim)  # [T, Hq + 2 Hkv, D]
        turned, value = heads[:, : self._rotated], heads[:, self._rotated :]
        if self.head_norm is not None:
            turned = self.head_norm(turned)
        if self.is_rotated:
            turned = torch.addcmul(turned * turn[0], turned.roll(self.head_dim // 2, -1), turn[1])
        query, key = turned[:, : self.num_heads], turned[:, self.num_heads :]
        attended = attend(self, query, key, value, self.options, {})  # [T, Hq, D]
        rows = rows + self._added(self._out(attended.view(rows.shape[0], -1)), self.last_norm)
        mixed = self._gate_up(rows if self.mlp_norm is None else self.mlp_norm(rows))
        gates = self.act(mixed[:, : self.num_gates]).mul_(mixed[:, self.num_gates :])
        return self._added(self._down(gates), self.mlp_last_norm).add_(rows)

    def _added(self, rows: Tensor, norm: Norm | None) -> Tensor:
        rows = rows if norm is None else norm(rows)
        return rows if self.share == 1.0 else rows * self.share


class Norm:
    """RMS norm in float32. The norm's weight is multiplied in the model's own type. In Gemma the row is multiplied by 1
    plus the weight, in float32."""

    def __init__(self, norm: Any) -> None:
        self.is_wide = type(norm).__name__.startswith("Gemma")
        self.weight: Tensor = norm.weight.detach().float() + 1.0 if self.is_wide else norm.weight
        self.eps = float(getattr(norm, "variance_epsilon", None) or norm.eps)

    def __call__(self, rows: Tensor) -> Tensor:
        if rows.dtype is not torch.float32:
            wide = rows.float()
            wide *= _inverse_rms(wide, self.eps)
            return (self.weight * wide).to(rows.dtype) if self.is_wide else self.weight * wide.to(rows.dtype)
        return (rows * _inverse_rms(rows, self.eps)).mul_(self.weight)


class HeadNorm(Norm):
    """The norm of query and key heads. The norm covers each head separately, or all query heads together and all key
    heads together. The norm's weight is [Hq + Hkv, D]."""

    def __init__(self, queries: Any, keys: Any, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__(queries)
        parts = ((self.weight, num_heads), (Norm(keys).weight, num_kv_heads))
        self.num_heads = num_heads
        self.is_of_all = self.weight.numel() != head_dim
        self.weight = torch.cat(
            [(w if self.is_of_all else w.repeat(count)).detach().view(count, head_dim) for w, count in parts]
        )

    def __call__(self, rows: Tensor) -> Tensor:
        """Normalize the heads: [T, Hq + Hkv, D] -> the same shape."""
        if not self.is_of_all:
            return super().__call__(rows)
        wide = rows.float()
        inverse = [
            _inverse_rms(part.flatten(1), self.eps).expand(-1, part.shape[1])
            for part in (wide[:, : self.num_heads], wide[:, self.num_heads :])
        ]  # [T, Hq] and [T, Hkv]
        return (wide * torch.cat(inverse, 1).unsqueeze(-1) * self.weight).to(rows.dtype)


def rotation(cos: Tensor, sin: Tensor) -> Rotation:
    """Convert cosines and sines [1, T, D] of transformers to [T, 1, D], with the first half of the sines negated."""
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
    return cos[0].unsqueeze(1), signed.unsqueeze(1)


def table_names(model: Any) -> list[str | None]:
    """Return the name of each layer's rotation table, by layer. In a model with a single rotation table, all names are
    None."""
    rotary = model.model.rotary_emb
    if "layer_type" not in inspect.signature(rotary.forward).parameters:
        return [None] * len(model.model.layers)
    return list(model.config.layer_types)


def angles(rotary: Any, rows: Tensor, positions: Tensor, name: str | None) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [1, T, D] of `positions` from the rotary module `rotary`. If a model has several
    rotation tables, `name` selects the table."""
    found: tuple[Tensor, Tensor] = rotary(rows, positions) if name is None else rotary(rows, positions, name)
    return found


def lower_layers(model: Any, geometry: Geometry) -> int:
    """Replace the decoder layers of a dense family by lean layers if these give equal results; return the number of
    replaced layers. Embedding, norm and output head of the model are unchanged. For the comparison, one layer of each
    kind is computed in both forms.
    """
    if model.config.model_type not in DENSE_FAMILIES:
        return 0
    layers, proven = model.model.layers, set()
    for number in range(len(layers)):
        lean = _lean(layers[number], geometry)
        if lean is None:
            return number
        kind = _kind(layers[number], lean, table_names(model)[lean.layer_idx])
        if kind not in proven and not _gives_the_same(model, layers[number], lean):
            return number
        proven.add(kind)
        layers[number] = lean
    return len(layers)


def are_lean(model: Any) -> bool:
    """Return whether all decoder layers of a model have the lean form."""
    return all(isinstance(layer, DenseLayer) for layer in getattr(getattr(model, "model", None), "layers", [None]))


def _lean(layer: Any, geometry: Geometry) -> DenseLayer | None:
    try:
        return DenseLayer(layer, geometry.layers[layer.self_attn.layer_idx])
    except (AttributeError, TypeError):
        return None  # the layer lacks a part, or has another part in its place


def _kind(layer: Any, lean: DenseLayer, table: str | None) -> tuple[Any, ...]:
    """Return the layer's properties, other than weights, on which the results of both forms depend. Layers with equal
    properties are compared once."""
    norms = (lean.norm, lean.last_norm, lean.mlp_norm, lean.mlp_last_norm, lean.head_norm)
    return (
        *(type(layer), type(layer.self_attn), type(layer.mlp), table, lean.is_rotated, lean.share, lean.options),
        *(lean.num_heads, lean.num_kv_heads, lean.head_dim, lean.num_gates, lean.act),
        *(None if norm is None else (tuple(norm.weight.shape), norm.eps) for norm in norms),
        *(_form(part) for part in (lean.qkv, lean.out, lean.gate_up, lean.down)),
    )


def _form(module: Any) -> tuple[Any, ...]:
    """Return the format in which one or several linear layers store their weights, for comparison."""
    if isinstance(module, Joined):
        return tuple(_form(part) for part in module.parts)
    sizes = (module.in_features, module.out_features, module.bias is None)
    return type(module), getattr(module, "kind", None), *sizes


def _gives_the_same(model: Any, layer: Any, lean: DenseLayer) -> bool:
    parameter = next(layer.parameters())
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, _NUM_TRIAL_TOKENS, model.config.hidden_size, generator=generator).to(parameter)
    positions = torch.arange(_NUM_TRIAL_TOKENS, device=parameter.device).unsqueeze(0)
    with torch.inference_mode(), attention_handler(attend_causally), in_floats():
        embeddings = angles(model.model.rotary_emb, rows, positions, table_names(model)[lean.layer_idx])
        want = layer(rows, position_embeddings=embeddings, position_ids=positions, attention_mask=None)
        try:
            have = lean(rows, position_embeddings=embeddings)
        except RuntimeError:
            return False  # the shapes match by chance, for example with partial rotation
    return is_close(want, have)


def is_close(want: Tensor, have: Tensor) -> bool:
    """Return whether two results differ by rounding only."""
    limit = TOLERANCES.get(want.dtype, 5e-2) * max(1.0, float(want.abs().max()))
    return float((want - have).abs().max()) <= limit


def attend_causally(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, extra: dict[str, Any]
) -> Tensor:
    """Compute causal attention over one sequence without a cache, for comparisons of layer forms. Window and soft-cap
    change the result's scale, so that a comparison detects a layer that does not pass them."""
    query, key, value = (heads.transpose(0, 1).unsqueeze(0) for heads in (query, key, value))
    out = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=options.scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    rows = out[0].transpose(0, 1).contiguous()  # [T, Hq, D]
    return rows * (1.0 + 1.0 / (options.window or 1) + 1.0 / (options.softcap or 1.0))


def _inverse_rms(rows: Tensor, eps: float) -> Tensor:
    """Return the inverse of the root mean square: [..., n] -> [..., 1]"""
    return (rows * rows).mean(-1, keepdim=True).add_(eps).rsqrt_()


def _activation(module: nn.Module) -> Any:
    """Return the activation as a function. Common activations are returned as plain functions, which avoids the cost of
    a module call."""
    name = type(module).__name__
    return silu if name in ("SiLU", "SiLUActivation") else gelu_tanh if name == "GELUTanh" else module


def _take(parent: Any, joined: str, parts: tuple[str, ...]) -> tuple[tuple[str, ...], nn.Module]:
    """Join linear layers with the same input into one product. Return the names of the joined layers in transformers,
    and the product."""
    whole = getattr(parent, joined, None)
    if whole is not None:
        return (joined,), whole
    return parts, _join(*(getattr(parent, part) for part in parts))


def _norms_of(layer: Any) -> tuple[Any, ...]:
    """Return a layer's norms in this order: before attention, after attention, before the MLP, and after the MLP. If a
    layer has norms after attention and MLP, the name `post_attention_layernorm` means the norm after attention. In
    other layers, this name means the norm before the MLP."""
    before, after = getattr(layer, "input_layernorm", None), layer.post_attention_layernorm
    last = getattr(layer, "post_feedforward_layernorm", None)
    if last is None:
        return before, None, after, None
    return before, after, getattr(layer, "pre_feedforward_layernorm", None), last


def _norm(module: Any) -> Norm | None:
    return None if module is None else Norm(module)


def _head_norm(attention: Any, num_heads: int, num_kv_heads: int) -> HeadNorm | None:
    if getattr(attention, "q_norm", None) is None:
        return None
    return HeadNorm(attention.q_norm, attention.k_norm, num_heads, num_kv_heads, attention.head_dim)


class Joined(nn.Module):
    """Linear layers with the same input that cannot be joined into one product; each is computed separately."""

    def __init__(self, linears: Sequence[Any]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(linears)
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)

    def forward(self, rows: Tensor) -> Tensor:
        """Compute all layers, and concatenate their outputs: [..., in] -> [..., out]"""
        return torch.cat([part(rows) for part in self.parts], -1)


def _join(*linears: Any) -> nn.Module:
    """Return one layer that gives the outputs of several layers, concatenated."""
    if any(isinstance(linear, (QuantizedLinear, Int8Linear, CodeLinear, Float8Linear)) for linear in linears):
        return _join_quantized(linears)
    weight = torch.cat([linear.weight.detach() for linear in linears])
    with torch.device("meta"):
        joined = nn.Linear(weight.shape[1], weight.shape[0], bias=linears[0].bias is not None)
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if linears[0].bias is not None:
        joined.bias = nn.Parameter(_join_biases(linears), requires_grad=False)
    return shared(joined, share_of(linears[0]))


def _join_quantized(linears: Sequence[Any]) -> nn.Module:
    """Return one quantized product of layers that have the same form, otherwise a `Joined` of separate products."""
    if len({type(linear) for linear in linears}) > 1:
        return Joined(linears)
    if isinstance(linears[0], (CodeLinear, Float8Linear)):
        return linears[0].joined(list(linears[1:])) or Joined(linears)
    bias = None if linears[0].bias is None else _join_biases(linears)
    if isinstance(linears[0], QuantizedLinear):
        return join(linears, bias) or Joined(linears)
    integers, scales = zip(*(linear.integers() for linear in linears), strict=True)
    return Int8Linear.from_integers(torch.cat(integers), torch.cat(scales), bias, linears[0].dtype)


def _join_biases(linears: Sequence[Any]) -> Tensor:
    return torch.cat([linear.bias.detach() for linear in linears])
