"""Small models with recurrent layers, as GGUF files can hold them."""

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
