"""Model families with recurrent layers: short convolutions or delta rules combined with attention, and Mamba."""

from __future__ import annotations

from bridle.gguf import rules as r
from bridle.gguf.expert_families import DENSE_OR_SPARSE
from bridle.gguf.family import GgufFamily
from bridle.gguf.fields import Field
from bridle.gguf.mamba_families import MAMBA_FAMILIES

_LINEAR = "linear_attention"
_FULL = "full_attention"


def _delta(values: r.Order = "", late_values: r.Order = "") -> tuple[r.TensorRule, ...]:
    """Return the tensor rules of a gated delta net layer. `values` and `late_values` name the orders in which the file
    stores the layer's value rows."""
    prefix = "linear_attn"
    return (
        r.layer(f"{prefix}.A_log", "ssm_a!", "decay", values),
        r.layer(f"{prefix}.dt_bias", "ssm_dt", order=values),
        r.layer(f"{prefix}.conv1d", "ssm_conv1d", "conv", late_values),
        r.layer(f"{prefix}.in_proj_qkvz", "attn_qkv+attn_gate", order="by key head"),
        r.layer(f"{prefix}.in_proj_ba", "ssm_ba"),
        r.layer(f"{prefix}.in_proj_qkv", "attn_qkv", order=late_values),
        r.layer(f"{prefix}.in_proj_z", "attn_gate", order=values),
        r.layer(f"{prefix}.in_proj_a", "ssm_alpha", order=values),
        r.layer(f"{prefix}.in_proj_b", "ssm_beta", order=values),
        r.layer(f"{prefix}.norm", "ssm_norm"),
        r.layer(f"{prefix}.out_proj", "ssm_out", columns=values),
    )


#: Norms whose weights in files are 1 more than in transformers, except those of the delta rule.
_QWEN = (
    *r.top(offset=True),
    r.layer("input_layernorm", "attn_norm", "offset"),
    r.layer("post_attention_layernorm", "post_attention_norm", "offset"),
    *r.attention(),
    *r.head_norms(offset=True),
)
_SORTED = _delta("values", "late values")
_DELTA_KINDS = (("layer_types", (("ssm_conv1d.weight", _LINEAR), ("attn_k.weight", _FULL))),)
_QWEN_TRAITS = ("draft layers", "delta rule", "half rotated")
_LFM = (
    r.EMBEDDING,
    r.TensorRule("model.embedding_norm", ("token_embd_norm",)),
    r.HEAD,
    r.layer("operator_norm", "attn_norm"),
    r.layer("ffn_norm", "ffn_norm"),
    r.layer("conv.conv", "shortconv.conv", "conv"),
    r.layer("conv.in_proj", "shortconv.in_proj"),
    r.layer("conv.out_proj", "shortconv.out_proj"),
    r.layer("self_attn.q_proj", "attn_q"),
    r.layer("self_attn.k_proj", "attn_k"),
    r.layer("self_attn.v_proj", "attn_v"),
    r.layer("self_attn.out_proj", "attn_output"),
    r.layer("self_attn.q_layernorm", "attn_q_norm"),
    r.layer("self_attn.k_layernorm", "attn_k_norm"),
    r.layer("feed_forward.w1", "ffn_gate"),
    r.layer("feed_forward.w3", "ffn_up"),
    r.layer("feed_forward.w2", "ffn_down"),
)
_LFM_KINDS = (("layer_types", (("shortconv.conv.weight", "conv"), ("attn_k.weight", _FULL))),)
_LFM_FIELDS = (Field("shortconv.l_cache", "conv_L_cache"),)
_WIDE = frozenset({"feed_forward_length"})
_KIMI = (
    *r.top(),
    *r.LATENT,
    *r.TWO_NORMS,
    r.layer("self_attn.k_proj", "attn_k"),
    r.layer("self_attn.v_proj", "attn_v"),
    r.layer("self_attn.conv1d", "ssm_conv1d_q+ssm_conv1d_k+ssm_conv1d_v", "conv"),
    r.layer("self_attn.forget_gate.dt_bias", "ssm_dt"),
    r.layer("self_attn.b_proj", "ssm_beta"),
    r.layer("self_attn.o_norm", "ssm_norm"),
    *r.GATED,
    *r.EXPERTS,
    *r.SHARED_EXPERTS,
)
_KIMI_KINDS = (("layer_types", (("ssm_conv1d_q.weight", _LINEAR), ("attn_kv_a_mqa.weight", _FULL))), DENSE_OR_SPARSE)
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
    *MAMBA_FAMILIES,
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
            r.layer("feed_forward.gate", "ffn_gate_inp"),
            r.layer("feed_forward.expert_bias", "exp_probs_b"),
            r.layer("feed_forward.experts.gate_up_proj", "ffn_gate_exps+ffn_up_exps"),
            r.layer("feed_forward.experts.down_proj", "ffn_down_exps"),
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
        (*_QWEN, *_delta(), *r.EXPERTS, *r.SHARED_EXPERT),
        reads=(*_QWEN_TRAITS, "expert sizes", "even experts", "shared expert"),
        kinds=_DELTA_KINDS,
    ),
    GgufFamily(
        "qwen35",
        "qwen3_5_text",
        (*_QWEN, *_SORTED, *r.GATED),
        reads=(*_QWEN_TRAITS, "three positions"),
        kinds=_DELTA_KINDS,
    ),
    GgufFamily(
        "qwen35moe",
        "qwen3_5_moe_text",
        (*_QWEN, *_SORTED, *r.EXPERTS, *r.SHARED_EXPERT),
        reads=(*_QWEN_TRAITS, "three positions", "routed experts", "shared expert"),
        kinds=_DELTA_KINDS,
    ),
    GgufFamily(
        "kimi-linear",
        "kimi_linear",
        (
            *_KIMI,
            r.layer("self_attn.forget_gate.A_log", "ssm_a!", "decays"),
            r.layer("self_attn.forget_gate.f_a_proj", "ssm_f_a"),
            r.layer("self_attn.forget_gate.f_b_proj", "ssm_f_b"),
            r.layer("self_attn.g_a_proj", "ssm_g_a"),
            r.layer("self_attn.g_b_proj", "ssm_g_b"),
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
            r.layer("self_attn.forget_gate.A_log", "ssm_a!", "rise"),
            r.layer("self_attn.forget_gate.f_proj", "ssm_f_a"),
            r.layer("self_attn.g_proj", "ssm_g_a"),
            r.layer("self_attn.g_proj", "attn_gate"),  # in layers of attention
        ),
        reads=("draft layers", "delta rule by channel", "dense first", "sigmoid"),
        fields=(*_KIMI_FIELDS, Field("kda.gate_lower_bound", "kda_lower_bound", None, float)),
        constants=(("kda_safe_gate", True),),
        kinds=_KIMI_KINDS,
        lists_heads=True,
        layout="latent",
    ),
)
