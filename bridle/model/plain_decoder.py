"""Decoders for common GGUF files, with the module names of transformers' classes. The package transformers is not
imported, because the import takes longer than reading a small model.

The decoders support Llama's layers, with biases, the head norms of Qwen and Gemma, and sliding windows. A model with
any other feature is computed by transformers. `bridle.model.dense_layer` replaces the layers of these decoders with
lean layers, as it does for layers of transformers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from bridle.model.attention import bridle_attention
from bridle.model.plain_config import PlainConfig


class PlainDecoder(nn.Module):
    """Embedding, layers, norm and output head of a model. The weights have no memory until they are read."""

    def __init__(self, config: PlainConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.model = _Body(config, dtype)
        self.lm_head = _linear(config.hidden_size, config.vocab_size, False, dtype)

    @property
    def device(self) -> torch.device:
        return next(self.model.norm.parameters()).device

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False, logits_to_keep: Tensor | None = None
    ) -> Any:
        """Return an object with `logits` [1, R, V]. Inputs are ids and positions [1, T], and R indices into T of the
        tokens to compute logits for (None: all). The current attention handler computes attention, as in models of
        transformers."""
        rows = self.model(input_ids, position_ids)
        logits = self.lm_head(rows if logits_to_keep is None else rows[:, logits_to_keep])
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = torch.tanh(logits / cap) * cap
        return SimpleNamespace(logits=logits)


class _Body(nn.Module):
    def __init__(self, config: PlainConfig, dtype: torch.dtype) -> None:
        super().__init__()
        scale = config.hidden_size**0.5 if config.is_gemma else None
        self.embed_tokens = _Embedding(config.vocab_size, config.hidden_size, scale, dtype)
        self.layers = nn.ModuleList(_Layer(config, number, dtype) for number in range(config.num_hidden_layers))
        self.norm = _norm(config, config.hidden_size, dtype)
        self.rotary_emb = _RotaryByType(config) if config.layer_types else _Rotary(config)
        self._types: list[tuple[str, ...]] = [(name,) for name in config.layer_types] or [()] * config.num_hidden_layers

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Compute all layers: ids and positions [1, T] -> [1, T, hidden]"""
        rows = self.embed_tokens(ids)
        for layer, named in zip(self.layers, self._types, strict=True):
            rows = layer(rows, position_embeddings=self.rotary_emb(rows, positions, *named))
        return self.norm(rows)  # type: ignore[no-any-return]


class _Embedding(nn.Embedding):
    """An embedding with floating-point rows and an optional scale."""

    def __init__(self, size: int, width: int, scale: float | None, dtype: torch.dtype) -> None:
        super().__init__(size, width, _weight=_unread(dtype, size, width))
        number = None if scale is None else torch.tensor(scale, dtype=dtype)
        self.register_buffer("embed_scale", number, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings of ids: [...] -> [..., hidden]"""
        rows, scale = super().forward(ids), self.embed_scale
        return rows if scale is None else rows * scale.to(rows.dtype)  # type: ignore[operator]


class _Layer(nn.Module):
    def __init__(self, config: PlainConfig, number: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(config, number, dtype), _Mlp(config, dtype)
        names = ["input_layernorm", "post_attention_layernorm"]
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if config.is_gemma else []
        for name in names:
            self.add_module(name, _norm(config, config.hidden_size, dtype))
        self._norms = names

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **unused: Any
    ) -> Tensor:  # the signature of transformers' layers
        """Compute the layer: [1, T, hidden] -> [1, T, hidden]"""
        before, *rest = (self.get_submodule(name) for name in self._norms)
        attended = self.self_attn(before(hidden_states), position_embeddings)
        if len(rest) == 1:
            rows = hidden_states + attended
            return rows + self.mlp(rest[0](rows))  # type: ignore[no-any-return]
        after, mlp_before, mlp_after = rest
        rows = hidden_states + after(attended)
        return rows + mlp_after(self.mlp(mlp_before(rows)))  # type: ignore[no-any-return]


class _Attention(nn.Module):
    def __init__(self, config: PlainConfig, number: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_idx, self.head_dim = number, config.head_dim
        is_sliding = bool(config.layer_types) and config.layer_types[number] == "sliding_attention"
        self.window = config.sliding_window if is_sliding else None
        self.scaling = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
        width, heads = config.hidden_size, config.num_attention_heads * config.head_dim
        keys, has_bias = config.num_key_value_heads * config.head_dim, config.attention_bias
        is_biased = has_bias or config.model_type == "qwen2"
        self.q_proj = _linear(width, heads, is_biased, dtype)
        self.k_proj = _linear(width, keys, is_biased, dtype)
        self.v_proj = _linear(width, keys, is_biased, dtype)
        self.o_proj = _linear(heads, width, has_bias, dtype)
        has_norms = config.model_type in ("qwen3", "gemma3_text")
        self.q_norm, self.k_norm = (_norm(config, config.head_dim, dtype) if has_norms else None for _ in range(2))

    def forward(self, rows: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Compute attention: [1, T, hidden] -> [1, T, hidden]"""
        query, key, value = (
            linear(rows).unflatten(-1, (-1, self.head_dim)) for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        heads, _ = bridle_attention(
            self,
            _rotated(query, *table),
            _rotated(key, *table),
            value,
            None,
            scaling=self.scaling,
            sliding_window=self.window,
        )
        return self.o_proj(heads.flatten(2))  # type: ignore[no-any-return]


class _Mlp(nn.Module):
    def __init__(self, config: PlainConfig, dtype: torch.dtype) -> None:
        super().__init__()
        width, inner, has_bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = _linear(width, inner, has_bias, dtype)
        self.up_proj = _linear(width, inner, has_bias, dtype)
        self.down_proj = _linear(inner, width, has_bias, dtype)
        self.act_fn: nn.Module = GELUTanh("tanh") if config.is_gemma else nn.SiLU()

    def forward(self, rows: Tensor) -> Tensor:
        """Compute the MLP: [..., hidden] -> [..., hidden]"""
        return self.down_proj(self.act_fn(self.gate_proj(rows)) * self.up_proj(rows))  # type: ignore[no-any-return]


class GELUTanh(nn.GELU):
    """The tanh approximation of GELU, under the class name that lean layers recognize."""


class _RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(_unread(dtype, size)), eps

    def forward(self, rows: Tensor) -> Tensor:
        """Normalize rows: [..., n] -> [..., n]"""
        return self.weight * self._normed(rows).to(rows.dtype)

    def _normed(self, rows: Tensor) -> Tensor:
        wide = rows.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)


class GemmaRmsNorm(_RmsNorm):
    """An RMS norm with the factor 1 plus its weight, under a class name that lean layers recognize."""

    def forward(self, rows: Tensor) -> Tensor:
        """Normalize rows: [..., n] -> [..., n]"""
        return (self._normed(rows) * (1.0 + self.weight.float())).type_as(rows)


def _linear(inputs: int, outputs: int, has_bias: bool, dtype: torch.dtype) -> nn.Linear:
    """Return a linear layer whose weight has no memory yet. The layer is not made on the `meta` device, because that
    would import torch's compiler."""
    made = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(made)
    made.in_features, made.out_features = inputs, outputs
    made.weight = nn.Parameter(_unread(dtype, outputs, inputs))
    made.register_parameter("bias", nn.Parameter(_unread(dtype, outputs)) if has_bias else None)
    return made


def _unread(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _norm(config: PlainConfig, size: int, dtype: torch.dtype) -> _RmsNorm:
    return (GemmaRmsNorm if config.is_gemma else _RmsNorm)(size, config.rms_norm_eps, dtype)


class _Rotary(nn.Module):
    """Computes the cosines and sines of positions."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.attention_scaling = 1.0
        self.register_buffer("inv_freq", _frequencies(config, ""), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of positions [1, T]: two tensors [1, T, D]"""
        return _table(self.inv_freq, x, position_ids)  # type: ignore[arg-type]


class _RotaryByType(nn.Module):
    """Computes the cosines and sines of positions, which depend on the type of the layer."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        for name in sorted(set(config.layer_types)):
            self.register_buffer(f"{name}_inv_freq", _frequencies(config, name), persistent=False)
            setattr(self, f"{name}_attention_scaling", 1.0)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of positions [1, T]: two tensors [1, T, D]"""
        return _table(self.get_buffer(f"{layer_type}_inv_freq"), x, position_ids)


def _frequencies(config: PlainConfig, layer_type: str) -> Tensor:
    rope = config.rope_parameters[layer_type]
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    found = 1.0 / (rope.rope_theta ** (steps / config.head_dim))
    return found / rope.factor if rope.rope_type == "linear" else found


def _table(frequencies: Tensor, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    freqs = positions[..., None].float() * frequencies
    angles = torch.cat((freqs, freqs), -1)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads: [1, H, T, D] -> the same shape"""
    first, second = heads.chunk(2, -1)
    return heads * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)
