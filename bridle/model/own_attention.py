"""Adapts model families whose layers have their own attention functions to paged attention.

During a step, the queries, keys and values of such layers go to the attention handler and the paged cache. Outside of a
step, such layers compute as in transformers, which is the reference for tests. Position biases (ALiBi) become
additional components of each key. The bias may be a function of the key's position alone, because a term that all keys
share does not change a softmax. Llama 4's attention chunks become sliding windows of the same length, in which keys of
the previous chunk get no weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bridle.model.attention import bridle_attention
from bridle.model.compressed_attention import lead_compressors
from bridle.model.forward_context import handler_or_none
from bridle.model.indexed_attention import lead_indexers
from bridle.model.support_checks import COMPRESSED_FAMILIES

#: The attention implementation in transformers that these families are loaded with. Falcon's `eager` adds ALiBi twice.
LIBRARY_ATTENTION = {
    **dict.fromkeys(("bloom", "codegen", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt", "openai-gpt", "xglm"), "eager"),
    "falcon": "sdpa",
}
#: Components that a key gets for its position. Three of them are used; the others keep heads aligned.
_ADDED = 8
#: Factor of these components in queries, so that they fit into half precision.
_UNIT = 64.0
#: Difference between the scores of a chunk's keys and those of its neighbour.
_CHUNK_STEP = 128.0
Projected = tuple[Tensor, Tensor, Tensor]
#: Queries and keys in changed form, and a window.
ChangedHeads = tuple[Tensor, Tensor, int | None]


def lead_to_bridle(model: nn.Module) -> nn.Module:
    """Make the layers of a model call bridle's attention, if its family is in `LIBRARY_ATTENTION`. Models of other
    families are unchanged. Returns the model."""
    config: Any = model.config
    if config.model_type == "llama4_text":
        _lead_llama4(model)
    if config.model_type in ("zamba", "zamba2"):
        _number_shared(model)
    if config.model_type in COMPRESSED_FAMILIES:
        lead_compressors(model)
    else:
        lead_indexers(model)
    if config.model_type not in LIBRARY_ATTENTION:
        return model
    # transformers would log that the attention of these families cannot be changed.
    vars(model)["set_attn_implementation"] = lambda name: None
    if has_biases(model):
        positions = _Positions(model)
        for layer in _layers_with(model, "query_key_value", "Wqkv"):
            _BIASED[config.model_type](layer, positions)
    else:
        for number, layer in enumerate(_layers_with(model, "_attn", "k_proj", "query_key_value")):
            _FAMILIES[config.model_type](layer, number)
    return model


def _number_shared(model: nn.Module) -> None:
    """Give Zamba's attention layers separate layer numbers in the cache, because they share one module."""
    layers: Any = model.get_submodule("model.layers")
    for number, layer in enumerate(layers):
        for name in ("shared_transf", "shared_transformer"):
            if hasattr(layer, name):
                getattr(layer, name).self_attn.layer_idx = number


def has_biases(model: nn.Module) -> bool:
    """Return whether the cached keys contain position biases (ALiBi), which need more precision than 8 bits."""
    config: Any = model.config
    return config.model_type in ("bloom", "mpt") or (config.model_type == "falcon" and bool(config.alibi))


def _layers_with(model: nn.Module, *names: str) -> Iterator[Any]:
    return (module for module in model.modules() if any(hasattr(module, name) for name in names))


def _replace(module: Any, name: str, attend: Callable[..., Any]) -> None:
    """Replace a module's method by `attend` inside steps."""
    original = getattr(module, name)

    def call(*args: Any, **options: Any) -> Any:
        return original(*args, **options) if handler_or_none() is None else attend(*args, **options)

    setattr(module, name, call)


# -- without biases ---------------------------------------------------------------------------------------------------


def _paged(
    module: Any, scaling: float, window: int | None, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, None]:
    """Compute attention over the cache: queries, keys and values [1, H, T, D] -> [1, H, T, D]"""
    query, key = query.to(value.dtype), key.to(value.dtype)
    rows, _ = bridle_attention(module, query, key, value, None, scaling=scaling, sliding_window=window)
    return rows.transpose(1, 2), None


def _lead_rotary(module: Any, number: int) -> None:
    """Change GPT-J, CodeGen and GPT-NeoX Japanese, whose scores are divided by the square root of the head size."""
    divisor = module.scale_attn if hasattr(module, "scale_attn") else module.norm_factor
    _replace(module, "_attn", partial(_paged, module, 1 / float(divisor), None))


def _lead_neo(module: Any, number: int) -> None:
    """Change GPT-Neo, whose scores are not scaled, and which has a sliding window in every other layer."""
    module.layer_idx = module.layer_id
    window = module.config.window_size if module.attention_type == "local" else None
    _replace(module, "_attn", partial(_paged, module, 1.0, window))


def _lead_first(module: Any, number: int) -> None:
    """Change GPT-1, whose attention function gets transposed keys and returns a list."""
    module.layer_idx = number

    def attend(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> list[Tensor]:
        scaling = value.shape[-1] ** -0.5 if module.scale else 1.0
        return [_paged(module, scaling, None, query, key.mT, value)[0]]

    _replace(module, "_attn", attend)


def _lead_xglm(module: Any, number: int) -> None:
    def attend(hidden_states: Tensor, **rest: Any) -> tuple[Tensor, None]:
        query, key, value = (
            part(hidden_states).unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)
            for part in (module.q_proj, module.k_proj, module.v_proj)
        )
        rows, _ = bridle_attention(module, query, key, value, None, scaling=module.scaling)
        return module.out_proj(rows.flatten(2)), None

    _replace(module, "forward", attend)


def _lead_falcon(module: Any, number: int) -> None:
    def attend(
        hidden_states: Tensor, alibi: None, attention_mask: Any, position_embeddings: Any, **rest: Any
    ) -> tuple[Tensor, None]:
        from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

        query, key, value = _falcon_heads(module, hidden_states)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        rows, _ = bridle_attention(module, query, key, value, None, scaling=module.inv_norm_factor)
        return module.dense(rows.flatten(2)), None

    _replace(module, "forward", attend)


def _falcon_heads(module: Any, hidden_states: Tensor) -> Projected:
    """Return the layer's queries, keys and values [1, H, T, D] for hidden states [1, T, hidden]. Key heads are not
    repeated, unlike in transformers."""
    fused = module.query_key_value(hidden_states)
    if not module.new_decoder_architecture:
        query, key, value = module._split_heads(fused)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    groups = fused.unflatten(-1, (module.num_kv_heads, -1, module.head_dim))  # [1, T, G, H / G + 2, D]
    query = groups[..., :-2, :].flatten(2, 3)
    return query.transpose(1, 2), groups[..., -2, :].transpose(1, 2), groups[..., -1, :].transpose(1, 2)


_FAMILIES: dict[str, Callable[[Any, int], None]] = {
    "codegen": _lead_rotary,
    "falcon": _lead_falcon,
    "gpt_neo": _lead_neo,
    "gpt_neox_japanese": _lead_rotary,
    "gptj": _lead_rotary,
    "openai-gpt": _lead_first,
    "xglm": _lead_xglm,
}


# -- with biases of positions -----------------------------------------------------------------------------------------


class _Positions:
    """Records the positions [T] of the current pass, because models of these families do not pass them to their
    layers."""

    def __init__(self, model: nn.Module) -> None:
        self.now = torch.empty(0)
        model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, model: nn.Module, args: Any, options: dict[str, Any]) -> None:
        if options.get("position_ids") is not None:
            self.now = options["position_ids"][0]


def _attend_biased(module: Any, heads: Projected, scaling: float, biases: Tensor) -> Tensor:
    """Compute attention [1, T, H * D] with `biases` [H, T], which are added to the scores of the keys before
    scaling."""
    query, key, value = heads
    if key.shape[1] < query.shape[1]:  # each head has its own biases
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    query = torch.cat((query, query.new_full((*query.shape[:3], _ADDED), _UNIT)), -1)
    key = torch.cat((key, _parts_of(biases / _UNIT).to(key.dtype)[None]), -1)
    rows, _ = bridle_attention(module, query, key, value, None, scaling=scaling)
    return rows.flatten(2)


def _parts_of(numbers: Tensor) -> Tensor:
    """Split float32 values [H, T] into bfloat16 parts [H, T, 8]. The sum of a value's parts is the value."""
    parts = numbers.new_zeros(*numbers.shape, _ADDED)
    for at in range(3):
        parts[..., at] = numbers.bfloat16()
        numbers = numbers - parts[..., at]
    return parts


def _lead_bloom(module: Any, positions: _Positions) -> None:
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

    slopes = _get_alibi_slopes(module.num_heads, module.query_key_value.weight.device)[:, None]

    def attend(hidden_states: Tensor, residual: Tensor, **rest: Any) -> tuple[Tensor, None]:
        heads = module._reshape(module.query_key_value(hidden_states))
        biases = slopes * positions.now / module.inv_norm_factor
        return module.dense(_attend_biased(module, heads, module.inv_norm_factor, biases)) + residual, None

    _replace(module, "forward", attend)


def _lead_mpt(module: Any, positions: _Positions) -> None:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    two = build_mpt_alibi_tensor(module.n_heads, 2, device=module.Wqkv.weight.device)  # of positions -1 and 0
    slopes = two[:, 0, 1:] - two[:, 0, :1]  # [H, 1]

    def attend(hidden_states: Tensor, **rest: Any) -> tuple[Tensor, None]:
        mixed = module.Wqkv(hidden_states)
        if module.clip_qkv:
            mixed = mixed.clamp(-module.clip_qkv, module.clip_qkv)
        query, key, value = (
            part.unflatten(-1, (module.n_heads, module.head_dim)).transpose(1, 2) for part in mixed.chunk(3, -1)
        )
        biases = slopes * positions.now / module.softmax_scale
        return module.out_proj(_attend_biased(module, (query, key, value), module.softmax_scale, biases)), None

    _replace(module, "forward", attend)


def _lead_biased_falcon(module: Any, positions: _Positions) -> None:
    """Change Falcon with ALiBi. As in transformers, biases are rounded to bfloat16, and scaled together with the
    scores."""
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    def attend(hidden_states: Tensor, **rest: Any) -> tuple[Tensor, None]:
        ones = torch.ones(1, 2, dtype=torch.long, device=hidden_states.device)
        slopes = build_alibi_tensor(ones, module.num_heads, torch.bfloat16)[:, 0, 1:]  # [H, 1]
        biases = (slopes * positions.now).float()
        scale = 1 / math.sqrt(module.head_dim)
        rows = _attend_biased(module, _falcon_heads(module, hidden_states), scale, biases)
        return module.dense(rows), None

    _replace(module, "forward", attend)


_BIASED: dict[str, Callable[[Any, _Positions], None]] = {
    "bloom": _lead_bloom,
    "falcon": _lead_biased_falcon,
    "mpt": _lead_mpt,
}


# -- Llama 4 ----------------------------------------------------------------------------------------------------------


def _lead_llama4(model: nn.Module) -> None:
    """Change Llama 4. In transformers, Llama 4's layers express chunks by a mask, and scale queries by their index in
    the pass instead of their position."""
    config: Any = model.config
    positions = _Positions(model)
    for module in _layers_with(model, "attn_temperature_tuning"):
        if config.layer_types[module.layer_idx] == "chunked_attention":
            module.change_heads = partial(_chunked, positions, config.attention_chunk_size, module.scaling)
        elif module.attn_temperature_tuning and not module.use_rope:
            module.change_heads = partial(_scaled, positions, module.floor_scale, module.attn_scale)
            _replace(module, "forward", partial(_unscaled, module, module.forward))


def _chunked(positions: _Positions, size: int, scaling: float, query: Tensor, key: Tensor) -> ChangedHeads:
    """Add a component to keys and queries whose sign differs between even and odd chunks, so that keys of other chunks
    get no weight. A window covers at most two chunks, so two signs are enough."""
    signs = 1 - 2 * (positions.now // size % 2).to(query.dtype)  # [T]
    added = torch.zeros(len(signs), _ADDED, dtype=query.dtype, device=query.device)
    added[:, 0] = signs
    longer = (added * (_CHUNK_STEP / 2 / scaling)).expand(*query.shape[:2], -1, -1)
    query = torch.cat((query, longer), -1)
    return query, torch.cat((key, added.expand(*key.shape[:2], -1, -1)), -1), size


def _scaled(positions: _Positions, floor: float, scale: float, query: Tensor, key: Tensor) -> ChangedHeads:
    factors = torch.log1p(torch.floor((positions.now.float() + 1.0) / floor)) * scale + 1.0  # [T]
    return (query * factors[:, None]).to(query.dtype), key, None


def _unscaled(module: Any, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run the forward pass of the layer without the layer's scaling of queries."""
    module.attn_temperature_tuning = False
    try:
        return forward(*args, **options)
    finally:
        module.attn_temperature_tuning = True
