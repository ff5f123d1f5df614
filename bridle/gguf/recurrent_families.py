"""Families with layers that keep a state, alone or next to attention."""

from __future__ import annotations

from bridle.gguf.expert_families import DENSE_OR_SPARSE
from bridle.gguf.family import GgufFamily
from bridle.gguf.fields import Field
from bridle.gguf.rules import (
    EMBEDDING,
    EXPERTS,
    GATED,
    HEAD,
    LATENT,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    TWO_NORMS,
    Order,
    TensorRule,
    attention,
    head_norms,
    layer,
    top,
)

_LINEAR = "linear_attention"
_FULL = "full_attention"


def _mamba(prefix: str, *, has_norm: bool = True) -> tuple[TensorRule, ...]:
    """A Mamba-2 layer."""
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
    """A layer of the first Mamba."""
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


def _delta(values: Order = "", late_values: Order = "") -> tuple[TensorRule, ...]:
    """A layer of the gated delta rule; rows of values are in the given orders."""
    prefix = "linear_attn"
    return (
        layer(f"{prefix}.A_log", "ssm_a!", "decay", values),
        layer(f"{prefix}.dt_bias", "ssm_dt", order=values),
        layer(f"{prefix}.conv1d", "ssm_conv1d", "conv", late_values),
        layer(f"{prefix}.in_proj_qkvz", "attn_qkv+attn_gate", order="by key head"),
        layer(f"{prefix}.in_proj_ba", "ssm_ba"),
        layer(f"{prefix}.in_proj_qkv", "attn_qkv", order=late_values),
        layer(f"{prefix}.in_proj_z", "attn_gate", order=values),
        layer(f"{prefix}.in_proj_a", "ssm_alpha", order=values),
        layer(f"{prefix}.in_proj_b", "ssm_beta", order=values),
        layer(f"{prefix}.norm", "ssm_norm"),
        layer(f"{prefix}.out_proj", "ssm_out", columns=values),
    )


#: Norms that are one more than the library's weights, but for those of the delta rule.
_QWEN = (
    *top(offset=True),
    layer("input_layernorm", "attn_norm", "offset"),
    layer("post_attention_layernorm", "post_attention_norm", "offset"),
    *attention(),
    *head_norms(offset=True),
)
_SORTED = _delta("values", "late values")
_DELTA_KINDS = (("layer_types", (("ssm_conv1d.weight", _LINEAR), ("attn_k.weight", _FULL))),)
_QWEN_TRAITS = ("draft layers", "delta rule", "half rotated")
_LFM = (
    EMBEDDING,
    TensorRule("model.embedding_norm", ("token_embd_norm",)),
    HEAD,
    layer("operator_norm", "attn_norm"),
    layer("ffn_norm", "ffn_norm"),
    layer("conv.conv", "shortconv.conv", "conv"),
    layer("conv.in_proj", "shortconv.in_proj"),
    layer("conv.out_proj", "shortconv.out_proj"),
    layer("self_attn.q_proj", "attn_q"),
    layer("self_attn.k_proj", "attn_k"),
    layer("self_attn.v_proj", "attn_v"),
    layer("self_attn.out_proj", "attn_output"),
    layer("self_attn.q_layernorm", "attn_q_norm"),
    layer("self_attn.k_layernorm", "attn_k_norm"),
    layer("feed_forward.w1", "ffn_gate"),
    layer("feed_forward.w3", "ffn_up"),
    layer("feed_forward.w2", "ffn_down"),
)
_LFM_KINDS = (("layer_types", (("shortconv.conv.weight", "conv"), ("attn_k.weight", _FULL))),)
_LFM_FIELDS = (Field("shortconv.l_cache", "conv_L_cache"),)
_WIDE = frozenset({"feed_forward_length"})
_FORWARD = (
    layer("feed_forward.gate_proj", "ffn_gate"),
    layer("feed_forward.up_proj", "ffn_up"),
    layer("feed_forward.down_proj", "ffn_down"),
    layer("input_layernorm", "attn_norm"),
)
_FINAL = (EMBEDDING, TensorRule("model.final_layernorm", ("output_norm",)), HEAD)
_BACKBONE = (
    TensorRule("backbone.embeddings", EMBEDDING.file),
    TensorRule("backbone.norm_f", ("output_norm",)),
    HEAD,
)
_ALONE = frozenset({"feed_forward_length", "attention.head_count"})


def _in_backbone(rules: tuple[TensorRule, ...]) -> tuple[TensorRule, ...]:
    return tuple(rule._replace(model=rule.model.replace("model.", "backbone.", 1)) for rule in rules)


_NORM = layer("norm", "attn_norm")
_UNSCALED = (
    *((f"{name}_multiplier", 1.0) for name in ("attention_in", "attention_out", "embedding", "key", "lm_head")),
    *((f"ssm_{name}_multiplier", 1.0) for name in ("in", "out")),
    ("mlp_multipliers", [1.0] * 2),
    ("ssm_multipliers", [1.0] * 5),
)
_KIMI = (
    *top(),
    *LATENT,
    *TWO_NORMS,
    layer("self_attn.k_proj", "attn_k"),
    layer("self_attn.v_proj", "attn_v"),
    layer("self_attn.conv1d", "ssm_conv1d_q+ssm_conv1d_k+ssm_conv1d_v", "conv"),
    layer("self_attn.forget_gate.dt_bias", "ssm_dt"),
    layer("self_attn.b_proj", "ssm_beta"),
    layer("self_attn.o_norm", "ssm_norm"),
    *GATED,
    *EXPERTS,
    *SHARED_EXPERTS,
)
_KIMI_KINDS = (
    ("layer_types", (("ssm_conv1d_q.weight", _LINEAR), ("attn_kv_a_mqa.weight", _FULL))),
    DENSE_OR_SPARSE,
)
_KIMI_FIELDS = (
    Field("expert_count", "num_experts"),
    Field("expert_used_count", "num_experts_per_token"),
    Field("expert_feed_forward_length", "moe_intermediate_size"),
    Field("expert_shared_count", "num_shared_experts", 1),
    Field("expert_weights_scale", "routed_scaling_factor", 1.0, float),
    Field("expert_weights_norm", "moe_renormalize", True, bool),
    Field("expert_group_count", "num_expert_group", 1),
    Field("expert_group_used_count", "topk_group", 1),
)

RECURRENT_FAMILIES = (
    GgufFamily(
        "lfm2",
        "lfm2",
        _LFM,
        norm_field="norm_eps",
        reads=("adjusted width",),
        fields=_LFM_FIELDS,
        constants=(("conv_bias", False),),
        lacks=_WIDE,
        kinds=_LFM_KINDS,
        lists_heads=True,
    ),
    GgufFamily(
        "lfm2moe",
        "lfm2_moe",
        (
            *_LFM,
            layer("feed_forward.gate", "ffn_gate_inp"),
            layer("feed_forward.expert_bias", "exp_probs_b"),
            layer("feed_forward.experts.gate_up_proj", "ffn_gate_exps+ffn_up_exps"),
            layer("feed_forward.experts.down_proj", "ffn_down_exps"),
        ),
        norm_field="norm_eps",
        reads=("sigmoid",),
        fields=(
            *_LFM_FIELDS,
            Field("expert_count", "num_experts"),
            Field("expert_used_count", "num_experts_per_tok"),
            Field("expert_feed_forward_length", "moe_intermediate_size"),
            Field("leading_dense_block_count", "num_dense_layers", 0),
        ),
        constants=(
            ("conv_bias", False),
            ("norm_topk_prob", True),
            ("routed_scaling_factor", 1.0),
            ("use_expert_bias", True),
        ),
        kinds=_LFM_KINDS,
        lists_heads=True,
    ),
    GgufFamily(
        "qwen3next",
        "qwen3_next",
        (*_QWEN, *_delta(), *EXPERTS, *SHARED_EXPERT),
        reads=(*_QWEN_TRAITS, "expert sizes", "even experts", "shared expert"),
        kinds=_DELTA_KINDS,
    ),
    GgufFamily(
        "qwen35",
        "qwen3_5_text",
        (*_QWEN, *_SORTED, *GATED),
        reads=(*_QWEN_TRAITS, "three positions"),
        kinds=_DELTA_KINDS,
    ),
    GgufFamily(
        "qwen35moe",
        "qwen3_5_moe_text",
        (*_QWEN, *_SORTED, *EXPERTS, *SHARED_EXPERT),
        reads=(*_QWEN_TRAITS, "three positions", "routed experts", "shared expert"),
        kinds=_DELTA_KINDS,
    ),
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
        reads=("draft layers", "mamba 2 of nemotron", "widths", "experts between"),
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
    GgufFamily(
        "mamba",
        "mamba",
        (*_BACKBONE, *_in_backbone((_NORM, *_first_mamba("mixer")))),
        norm_field="layer_norm_epsilon",
        reads=("mamba", "norms of steps"),
        lacks=_ALONE,
        layout="none",
    ),
    GgufFamily(
        "mamba",
        "falcon_mamba",
        (*_BACKBONE, *_in_backbone((_NORM, *_first_mamba("mixer")))),
        norm_field="layer_norm_epsilon",
        reads=("mamba", "norms of steps"),
        lacks=_ALONE,
        layout="none",
    ),
    GgufFamily(
        "mamba2",
        "mamba2",
        (*_BACKBONE, *_in_backbone((_NORM, *_mamba("mixer")))),
        norm_field="layer_norm_epsilon",
        reads=("mamba 2",),
        lacks=_ALONE,
        layout="none",
    ),
    GgufFamily(
        "kimi-linear",
        "kimi_linear",
        (
            *_KIMI,
            layer("self_attn.forget_gate.A_log", "ssm_a!", "decays"),
            layer("self_attn.forget_gate.f_a_proj", "ssm_f_a"),
            layer("self_attn.forget_gate.f_b_proj", "ssm_f_b"),
            layer("self_attn.g_a_proj", "ssm_g_a"),
            layer("self_attn.g_b_proj", "ssm_g_b"),
        ),
        reads=("delta rule by channel", "dense first", "unrotated part", "sigmoid"),
        fields=_KIMI_FIELDS,
        lacks=frozenset({"rope"}),
        kinds=_KIMI_KINDS,
        lists_heads=True,
        layout="latent",
    ),
    GgufFamily(
        "bailingmoe3",
        "bailing_hybrid",
        (
            *_KIMI,
            layer("self_attn.forget_gate.A_log", "ssm_a!", "rise"),
            layer("self_attn.forget_gate.f_proj", "ssm_f_a"),
            layer("self_attn.g_proj", "ssm_g_a"),
            layer("self_attn.g_proj", "attn_gate"),  # in layers of attention
        ),
        reads=("draft layers", "delta rule by channel", "dense first", "sigmoid"),
        fields=(*_KIMI_FIELDS, Field("kda.gate_lower_bound", "kda_lower_bound", None, float)),
        constants=(("kda_safe_gate", True),),
        kinds=_KIMI_KINDS,
        lists_heads=True,
        layout="latent",
    ),
)
