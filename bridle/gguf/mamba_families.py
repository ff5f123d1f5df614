"""Model families with Mamba layers, alone or combined with attention layers."""

from __future__ import annotations

from bridle.gguf.family import GgufFamily
from bridle.gguf.fields import Field
from bridle.gguf.rules import EMBEDDING, HEAD, TWO_NORMS, TensorRule, attention, layer, moved, top

_LINEAR = "linear_attention"
_FULL = "full_attention"


def _mamba(prefix: str, *, has_norm: bool = True) -> tuple[TensorRule, ...]:
    """Return the tensor rules of a Mamba-2 layer."""
    norm = (layer(f"{prefix}.norm", "ssm_norm", "groups"),) if has_norm else ()
    return (
        layer(f"{prefix}.A_log", "ssm_a!", "decays"),
        layer(f"{prefix}.D", "ssm_d!", "column"),
        layer(f"{prefix}.dt_bias", "ssm_dt"),
        layer(f"{prefix}.conv1d", "ssm_conv1d", "conv"),
        layer(f"{prefix}.in_proj", "ssm_in"),
        layer(f"{prefix}.out_proj", "ssm_out"),
        *norm,
    )


def _first_mamba(prefix: str) -> tuple[TensorRule, ...]:
    """Return the tensor rules of a Mamba-1 layer."""
    return (
        layer(f"{prefix}.A_log", "ssm_a!", "decay"),
        layer(f"{prefix}.D", "ssm_d!"),
        layer(f"{prefix}.conv1d", "ssm_conv1d", "conv"),
        layer(f"{prefix}.in_proj", "ssm_in"),
        layer(f"{prefix}.x_proj", "ssm_x"),
        layer(f"{prefix}.dt_proj", "ssm_dt"),
        layer(f"{prefix}.out_proj", "ssm_out"),
        layer(f"{prefix}.dt_layernorm", "ssm_dt_norm"),
        layer(f"{prefix}.b_layernorm", "ssm_b_norm"),
        layer(f"{prefix}.c_layernorm", "ssm_c_norm"),
    )


_FORWARD = (
    layer("feed_forward.gate_proj", "ffn_gate"),
    layer("feed_forward.up_proj", "ffn_up"),
    layer("feed_forward.down_proj", "ffn_down"),
    layer("input_layernorm", "attn_norm"),
)
_FINAL = (EMBEDDING, TensorRule("model.final_layernorm", ("output_norm",)), HEAD)
_BACKBONE = (TensorRule("backbone.embeddings", EMBEDDING.file), TensorRule("backbone.norm_f", ("output_norm",)), HEAD)
_ALONE = frozenset({"feed_forward_length", "attention.head_count"})


_NORM = layer("norm", "attn_norm")
_UNSCALED = (
    *((f"{name}_multiplier", 1.0) for name in ("attention_in", "attention_out", "embedding", "key", "lm_head")),
    *((f"ssm_{name}_multiplier", 1.0) for name in ("in", "out")),
    ("mlp_multipliers", [1.0] * 2),
    ("ssm_multipliers", [1.0] * 5),
)
MAMBA_FAMILIES = (
    GgufFamily(
        "nemotron_h_moe",
        "nemotron_h",
        (
            TensorRule("model.embeddings", EMBEDDING.file),
            TensorRule("model.norm_f", ("output_norm",)),
            HEAD,
            _NORM,
            *_mamba("mixer"),
            layer("mixer.q_proj", "attn_q"),
            layer("mixer.k_proj", "attn_k"),
            layer("mixer.v_proj", "attn_v"),
            layer("mixer.o_proj", "attn_output"),
            layer("mixer.up_proj", "ffn_up"),
            layer("mixer.down_proj", "ffn_down"),
            layer("mixer.gate", "ffn_gate_inp"),
            layer("mixer.gate.e_score_correction_bias", "exp_probs_b"),
            layer("mixer.experts.up_proj", "ffn_up_exps"),
            layer("mixer.experts.down_proj", "ffn_down_exps"),
            layer("mixer.shared_experts.up_proj", "ffn_up_shexp"),
            layer("mixer.shared_experts.down_proj", "ffn_down_shexp"),
            layer("mixer.fc1_latent_proj", "ffn_latent_down"),
            layer("mixer.fc2_latent_proj", "ffn_latent_up"),
        ),
        norm_field="layer_norm_epsilon",
        reads=("draft layers", "mamba 2 of nemotron", "widths", "experts between", "both epsilons"),
        fields=(
            Field("expert_count", "n_routed_experts", 0),
            Field("expert_used_count", "num_experts_per_tok", 0),
            Field("expert_feed_forward_length", "moe_intermediate_size", 0),
            Field("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size", 0),
            Field("expert_shared_count", "n_shared_experts", 0),
            Field("expert_group_count", "n_group", 1),
            Field("expert_group_used_count", "topk_group", 1),
            Field("expert_weights_scale", "routed_scaling_factor", 1.0, float),
            Field("expert_weights_norm", "norm_topk_prob", True, bool),
        ),
        constants=(("mlp_hidden_act", "relu2"), ("time_step_min", 1e-9)),
        lacks=frozenset({"feed_forward_length", "rope"}),
        kinds=(
            (
                "layers_block_type",
                (
                    ("ssm_in.weight", _LINEAR),
                    ("attn_q.weight", _FULL),
                    ("ffn_up_exps.weight", "moe"),
                    ("ffn_up.weight", "mlp"),
                ),
            ),
        ),
        lists_heads=True,
    ),
    GgufFamily(
        "granitehybrid",
        "granitemoehybrid",
        (
            *top(),
            *attention(paired=True),
            *TWO_NORMS,
            *_mamba("mamba"),
            layer("block_sparse_moe.router", "ffn_gate_inp"),
            layer("block_sparse_moe.experts.gate_up_proj", "ffn_gate_exps+ffn_up_exps"),
            layer("block_sparse_moe.experts.down_proj", "ffn_down_exps"),
            layer("shared_mlp.input_linear", "ffn_gate_shexp+ffn_up_shexp"),
            layer("shared_mlp.output_linear", "ffn_down_shexp"),
            layer("shared_mlp.input_linear", "ffn_gate+ffn_up"),  # of models without experts
            layer("shared_mlp.output_linear", "ffn_down"),
        ),
        reads=("multipliers", "mamba 2 of granite", "granite experts", "rotated or not"),
        kinds=(("layer_types", (("ssm_in.weight", _LINEAR), ("attn_q.weight", _FULL))),),
        lists_heads=True,
    ),
    GgufFamily(
        "granitehybrid",
        "bamba",
        (*_FINAL, *attention(paired=True), *_FORWARD, layer("pre_ff_layernorm", "ffn_norm"), *_mamba("mamba")),
        reads=("mamba 2 of granite", "attention layers"),
        lists_heads=True,
    ),
    GgufFamily(
        "falcon-h1",
        "falcon_h1",
        (*_FINAL, *attention(), *_FORWARD, layer("pre_ff_layernorm", "ffn_norm!"), *_mamba("mamba")),
        reads=("mamba 2 of falcon", "norm of mamba"),
        constants=_UNSCALED,
    ),
    GgufFamily(
        "jamba",
        "jamba",
        (
            *_FINAL,
            *attention(),
            *_FORWARD,
            layer("pre_ff_layernorm", "ffn_norm"),
            *_first_mamba("mamba"),
            layer("feed_forward.router", "ffn_gate_inp"),
            layer("feed_forward.experts.gate_up_proj", "ffn_gate_exps+ffn_up_exps"),
            layer("feed_forward.experts.down_proj", "ffn_down_exps"),
        ),
        reads=("mamba of jamba", "periods"),
        fields=(Field("expert_count", "num_experts"), Field("expert_used_count", "num_experts_per_tok")),
        constants=(("use_mamba_kernels", False),),
        lacks=frozenset({"rope"}),
        lists_heads=True,
    ),
    *(
        GgufFamily(
            "mamba",
            name,
            (*_BACKBONE, *moved((_NORM, *_first_mamba("mixer")), "model", "backbone")),
            norm_field="layer_norm_epsilon",
            reads=("mamba", "norms of steps"),
            lacks=_ALONE,
            layout="none",
        )
        for name in ("mamba", "falcon_mamba")
    ),
    GgufFamily(
        "mamba2",
        "mamba2",
        (*_BACKBONE, *moved((_NORM, *_mamba("mixer")), "model", "backbone")),
        norm_field="layer_norm_epsilon",
        reads=("mamba 2",),
        lacks=_ALONE,
        layout="none",
    ),
)
