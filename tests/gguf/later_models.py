"""Small checkpoints of models with recurrent layers, and of newer models with experts, that GGUF files can hold."""

from __future__ import annotations

from typing import Any

_MOE: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "n_routed_experts": 4,
    "routed_scaling_factor": 1.5,
}
#: A name of each variant, its family, and what it needs beside the fields of `tests.fakes.tiny_checkpoints`.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {}),
    "lfm2_moe": ("lfm2_moe", {"tie_word_embeddings": True}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h_moe": ("nemotron_h", _MOE),
    "nemotron_h_latent": ("nemotron_h", {**_MOE, "moe_latent_size": 16}),
    "granite_h": ("granitemoehybrid", {"logits_scaling": 2.0, "residual_multiplier": 0.8}),
    "bamba": ("bamba", {}),
    "falcon_h1": ("falcon_h1", {}),
    "falcon_h1_normed": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "jamba": ("jamba", {}),
    "mamba": ("mamba", {}),
    "falcon_mamba": ("falcon_mamba", {}),
    "mamba2": ("mamba2", {}),
    "kimi_linear": ("kimi_linear", {"head_dim": None}),
    "ling": (
        "bailing_hybrid",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_nextn_predict_layers": 0,
        },
    ),
}

_SPARSE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
_SLIDING: dict[str, Any] = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
_MIMO_ROPE = {"rope_type": "default", "partial_rotary_factor": 0.5}
_MINICPM3: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": None,
    "tie_word_embeddings": True,
}
#: The same of families with experts, and of Apertus.
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("deepseek_v32", {}),
    "glm_moe_dsa": ("glm_moe_dsa", {}),
    "apertus": ("apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "exaone_moe": ("exaone_moe", {**_SPARSE, **_SLIDING}),
    "hy_v3": ("hy_v3", _SPARSE),
    "cohere2_moe": ("cohere2_moe", {**_SPARSE, **_SLIDING, "mlp_layer_types": ["sparse"] * 3}),
    "cohere2_moe_shared": (
        "cohere2_moe",
        {
            **_SPARSE,
            **_SLIDING,
            "num_shared_experts": 1,
            "prefix_dense_intermediate_size": 48,
            "expert_selection_fn": "sigmoid",
        },
    ),
    "afmoe": (
        "afmoe",
        {
            **_SPARSE,
            "sliding_window": 8,
            "mup_enabled": True,
            "num_hidden_layers": 4,
            "route_scale": 1.5,
            "num_shared_experts": 1,
            "mlp_layer_types": None,
        },
    ),
    "laguna": (
        "laguna",
        {
            **_SPARSE,
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            "num_attention_heads_per_layer": [4, 8, 8, 8],
            "shared_expert_intermediate_size": 48,
            "moe_routed_scaling_factor": 1.5,
        },
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {
            **_SPARSE,
            "n_routed_experts": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "v_head_dim": 12,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {**_MIMO_ROPE, "rope_theta": 50_000.0},
                "sliding_attention": {**_MIMO_ROPE, "rope_theta": 10_000.0},
            },
        },
    ),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 2.0}),
    "granitemoeshared": (
        "granitemoeshared",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    ),
    "mellum": (
        "mellum",
        {
            **_SLIDING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "mlp_layer_types": ["sparse"] * 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 50_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "glm": ("glm", {"head_dim": 8}),
    "granite_swa": (
        "granite_swa",
        {**_SLIDING, "logits_scaling": 2.0, "layer_rope_theta": [10_000.0, 0.0, 10_000.0], "attention_multiplier": 0.3},
    ),
    "granitemoe_swa": ("granitemoe_swa", {**_SLIDING, "num_local_experts": 4, "shared_intermediate_size": 48}),
    "phimoe": (
        "phimoe",
        {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True, "hidden_size": 32},
    ),
    "minicpm3": ("minicpm3", _MINICPM3),
    "hy_v4": ("hy_v4", {"swiglu_limit": 0.5, "index_topk": 64}),
    "jais2": ("jais2", {"num_key_value_heads": 4}),
    "gemma3n": (
        "gemma3n_text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 16,
            "intermediate_size": [64] * 4,
            "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 300,
            "altup_num_inputs": 4,
            "laurel_rank": 8,
            "num_kv_shared_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "attention_chunk_size": 8192,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "no_rope_layers": None,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 48,
        },
    ),
}

#: The same of earlier families, whose queries, keys and values are one matrix.
OLDER: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_neox": ("gpt_neox", {}),
    "pythia_halves": (
        "gpt_neox",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0, "partial_rotary_factor": 0.5},
            "use_parallel_residual": False,
        },
    ),
    "falcon": ("falcon", {"ffn_hidden_size": 128}),
    "falcon_11b": ("falcon", {"ffn_hidden_size": 128, "num_ln_in_parallel_attn": 1}),
    "falcon_7b": ("falcon", {"new_decoder_architecture": False, "num_kv_heads": None}),
    "bloom": ("bloom", {}),
    "mpt": ("mpt", {}),
}
