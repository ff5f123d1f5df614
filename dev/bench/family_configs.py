"""Tiny configurations of transformers' architectures: the default ones, with fewer and narrower layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

VOCAB, HIDDEN, HEADS, HEAD_DIM = 320, 64, 4, 16
_MAX_LAYERS = 6
_SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size"), VOCAB),
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "embed_dim",
            "dim",
            "out_hidden_size",
            "word_embed_proj_dim",
            "projection_dim",
            "embedding_size",
            "emb_dim",
            "text_hidden_size",
            "lm_hidden_size",
        ),
        HIDDEN,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "attention_heads",
            "decoder_attention_heads",
            "encoder_attention_heads",
            "swa_num_attention_heads",
        ),
        HEADS,
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), 2
    ),
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "attention_head_dim", "dim_head"), HEAD_DIM),
    **dict.fromkeys(("v_head_dim", "kv_lora_rank", "qk_nope_head_dim", "kv_channels"), HEAD_DIM),
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "q_lora_rank": 24,
    "rotary_dim": 8,
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_total"), 4
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_selected_experts", "top_k_experts"), 2),
    **dict.fromkeys(
        (
            "n_group",
            "topk_group",
            "n_shared_experts",
            "num_shared_experts",
            "moe_num_shared_experts",
            "first_k_dense_replace",
            "num_dense_layers",
        ),
        1,
    ),
    "intermediate_size": 96,
    "max_window_layers": 2,
    **dict.fromkeys(
        (
            "ffn_dim",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "n_inner",
            "ffn_hidden_size",
            "d_ff",
            "mlp_dim",
            "intermediate_size_mlp",
            "shared_intermediate_size",
            "block_ff_dim",
            "ffn_hidden_dim",
        ),
        96,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "expert_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
        ),
        24,
    ),
    **dict.fromkeys(("sliding_window", "attention_window", "local_attention"), 16),
    **dict.fromkeys(("hidden_size_per_layer_input", "altup_num_inputs_dim", "laurel_rank"), 16),
    "vocab_size_per_layer_input": VOCAB,
    **dict.fromkeys(("linear_num_key_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(
        (
            "depth",
            "num_layers",
            "n_layer",
            "n_layers",
            "num_hidden_layers",
            "encoder_layers",
            "decoder_layers",
            "num_decoder_layers",
            "layers",
            "encoder_num_layers",
        ),
        2,
    ),
}
_VISION: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_position_embeddings": 16, "intermediate_size": 96}
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")
_BY_LAYER = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "moe_layer_freq",
    "hybrid_layer_pattern",
    "no_rope_layers",
    "layers_types",
    "num_attention_heads_per_layer",
    "is_moe_layer",
)


#: Families whose layers need three-dimensional positions, but whose default configuration has no sections for them.
_THREE_DIMENSIONAL = frozenset(
    (
        *("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "glm4v_text", "glm4v_moe_text", "glm46v_text"),
        *("glm_ocr_text", "paddleocr_vl_text", "ernie4_5_vl_moe_text"),
    )
)


_VISUAL_TOKENS = {"<image>": 300, "<|extra_200|>": 301}
_COMPASS = {
    "rope_parameters": {
        "full_attention": None,
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]},
    }
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8}

#: Fields that a class of transformers needs so that its default configuration works, or can be made small.
_NEEDED: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"n_group": 1, "topk_group": 1, "num_experts": 4, "num_experts_per_tok": 2},
    "bamba": {**_MAMBA2, "num_hidden_layers": 2, "attn_layer_indices": [1]},
    "granitemoehybrid": {**_MAMBA2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "kimi_linear": {"num_experts_per_tok": 2, "linear_num_heads": 4, "linear_head_dim": HEAD_DIM},
    "mamba2": {"num_heads": 8, "head_dim": HEAD_DIM, "n_groups": 2, "state_size": 8, "chunk_size": 8},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "time_step_min": 1e-9,  # transformers applies it to prompts and not to single tokens
    },
    "chameleon": {"vocabulary_map": {**_VISUAL_TOKENS, "IMGIMGAZ": 302}},
    "cohere_compass_text": _COMPASS,
    "cohere_compass": {"text_config": _COMPASS},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "emu3": {
        "vocabulary_map": {**_VISUAL_TOKENS, "<|visual token 000000|>": 302},
        "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "attn_resolutions": [1], "codebook_size": 64},
    },
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}},
    "ernie4_5_vl_moe": {
        "text_config": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0, "mrope_section": [3, 3, 2]}
        }
    },
    "gemma4_assistant": {
        "text_config": {"vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 2}
    },
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM},
    "hunyuan_vl": {"text_config": {"head_dim": HEAD_DIM}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mistral4": {"qk_nope_head_dim": 8, "head_dim": HEAD_DIM, "qk_head_dim": HEAD_DIM},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "ministral": {"head_dim": HEAD_DIM},
    "nemotron": {"head_dim": HEAD_DIM, "num_key_value_heads": 2},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32]},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HEAD_DIM,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_associative_scan": False,
    },
    "step3p7": {
        "text_config": {
            "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention"],
            "share_expert_dim": 24,
        }
    },
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return the default configuration of a model type, reduced in size."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    return kind(**_merged(small_fields(kind()), _NEEDED.get(model_type, {})))


def _merged(fields: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return `fields` updated with `more`, also inside nested configurations."""
    inner = {name: _merged(fields[name], value) for name, value in more.items() if isinstance(fields.get(name), dict)}
    return {**fields, **more, **inner}


def small_fields(config: PreTrainedConfig, is_tower: bool = False) -> dict[str, Any]:
    """Return the fields that must differ from the defaults of this configuration class, to make the model small."""
    fields: dict[str, Any] = {}
    given = {name.removeprefix("_"): value for name, value in vars(config).items()}
    for name, value in given.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            is_text = any(part in name for part in ("text", "decoder", "llm", "language", "thinker"))
            own = {**_whole_numbers(value), **small_fields(value, not is_text)}
            fields[name] = {"model_type": value.model_type, **own} if value.model_type else own
        elif type(value) is int and (size := _small(name, value, is_tower)) != value:
            fields[name] = size
    _fit_layers(fields, given, is_tower)
    _fit_rotary(fields, given, config.model_type)
    if given.get("head_dim") is not None and given.get("head_dim") == given.get("qk_rope_head_dim"):
        fields["head_dim"] = fields["qk_rope_head_dim"]  # in these families, the rotated part of a head
    if "num_key_value_heads" in given and given.get("num_key_value_heads") == given.get("num_attention_heads"):
        fields["num_key_value_heads"] = HEADS
    return fields


def _whole_numbers(config: PreTrainedConfig) -> dict[str, int]:
    """Return the whole numbers in a configuration; a nested configuration may differ from the defaults of its class."""
    return {name: value for name, value in vars(config).items() if type(value) is int and not name.startswith("_")}


def _small(name: str, value: int, is_tower: bool) -> int:
    if is_tower and name in _VISION:
        return min(value, int(_VISION[name])) if value else value
    if name.endswith(("token_id", "token_index")) and value >= VOCAB:
        return 300 + sum(map(ord, name)) % 20
    size = _SIZES.get(name)
    return value if size is None or value <= 0 else min(value, size)


def _fit_layers(fields: dict[str, Any], given: dict[str, Any], is_tower: bool) -> None:
    """Keep at least one layer of each kind, and one entry per layer in every list."""
    count = next((given[name] for name in _LAYERS if type(given.get(name)) is int), None)
    if count is None:
        return
    lists = {name: v for name, v in given.items() if isinstance(v, (list, tuple)) and len(v) == count and count > 2}
    kinds = [tuple(str(values[layer]) for values in lists.values()) for layer in range(count)] if lists else []
    chosen = sorted({kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values())[:_MAX_LAYERS]
    while len(chosen) < min(2, count):
        chosen.append(next((layer for layer in range(count) if layer not in chosen), 0))
    chosen.sort()
    for name, values in lists.items():
        fields[name] = [_small_entry(values[layer]) for layer in chosen]
    for name in _LAYERS:
        if type(given.get(name)) is int and given[name] > 0:
            fields[name] = len(chosen)
    if "num_kv_shared_layers" in given:
        fields["num_kv_shared_layers"] = 0


def _small_entry(value: Any) -> Any:
    return min(value, HEADS) if type(value) is int else value


def _fit_rotary(fields: dict[str, Any], given: dict[str, Any], model_type: str) -> None:
    """Let the sections of three-dimensional rotary positions add up to half of a head, and add sections that a class
    requires."""
    parameters = given.get("rope_parameters")
    if not isinstance(parameters, dict):
        return
    heads = fields.get("num_attention_heads", HEADS)
    size = fields.get("head_dim") or fields.get("hidden_size", HIDDEN) // heads
    half = int(size * float(parameters.get("partial_rotary_factor") or 1.0)) // 2
    if "mrope_section" in parameters or model_type in _THREE_DIMENSIONAL:
        section = [half - 2 * (half // 3), half // 3, half // 3]
        fields["rope_parameters"] = {**parameters, "mrope_section": section}
