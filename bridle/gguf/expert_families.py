"""Model families with experts from 2025 and later. GGUF files of these families store most properties as plain metadata
fields."""

from bridle.gguf import rules as r
from bridle.gguf.family import GgufFamily
from bridle.gguf.fields import Field

#: Layers with and without experts: the field in transformers, and the tensors that show the kind of a layer.
DENSE_OR_SPARSE = ("mlp_layer_types", (("ffn_gate_inp.weight", "sparse"), ("ffn_gate.weight", "dense")))
COUNTS = (
    Field("expert_count", "num_experts"),
    Field("expert_used_count", "num_experts_per_tok"),
    Field("expert_feed_forward_length", "moe_intermediate_size"),
)
GROUPS = (Field("expert_group_count", "n_group", 1), Field("expert_group_used_count", "topk_group", 1))
_NORMED = Field("expert_weights_norm", "norm_topk_prob", False, bool)

_GRANITE = (
    *r.PAIRED,
    r.layer("block_sparse_moe.router", "ffn_gate_inp"),
    r.layer("block_sparse_moe.experts.gate_up_proj", "ffn_gate_exps+ffn_up_exps"),
    r.layer("block_sparse_moe.experts.down_proj", "ffn_down_exps"),
)

EXPERT_FAMILIES = (
    GgufFamily("granitemoe", "granitemoe", _GRANITE, reads=("multipliers", "experts")),
    GgufFamily(
        "granitemoe",
        "granitemoeshared",
        (
            *_GRANITE,
            r.layer("shared_mlp.input_linear", "ffn_gate_shexp+ffn_up_shexp"),
            r.layer("shared_mlp.output_linear", "ffn_down_shexp"),
        ),
        reads=("multipliers", "experts"),
        fields=(Field("expert_shared_feed_forward_length", "shared_intermediate_size"),),
    ),
    GgufFamily(
        "granite_swa",
        "granitemoe_swa",
        (
            *r.PAIRED,
            r.layer("self_attn.sinks", "attn_sinks"),
            r.layer("block_sparse_moe.router", "ffn_gate_inp"),
            r.layer("block_sparse_moe.experts.gate_up_proj", "ffn_gate_up_exps"),
            r.layer("block_sparse_moe.experts.down_proj", "ffn_down_exps"),
            r.layer("shared_mlp.input_linear", "ffn_up_shexp"),
            r.layer("shared_mlp.output_linear", "ffn_down_shexp"),
        ),
        reads=("biases", "multipliers", "experts", "window in some", "layers with a rotation"),
        fields=(Field("expert_shared_feed_forward_length", "shared_intermediate_size", 0),),
    ),
    GgufFamily(
        "phimoe",
        "phimoe",
        (
            *r.PLAIN,
            r.layer("mlp.router", "ffn_gate_inp"),
            r.layer("mlp.experts.gate_up_proj", "ffn_gate_exps+ffn_up_exps"),
            r.layer("mlp.experts.down_proj", "ffn_down_exps"),
        ),
        reads=("experts", "attention bias", "bias of the head", "no window", "unscaled"),
    ),
    GgufFamily(
        "mellum",
        "mellum",
        (*r.PLAIN, *r.head_norms(), *r.GATED, *r.EXPERTS),
        reads=("window in some", "two rotations"),
        fields=(Field("expert_count", "num_local_experts"), *COUNTS[1:]),
        constants=(("norm_topk_prob", True),),
        lacks=frozenset({"rope"}),
        kinds=(DENSE_OR_SPARSE,),
    ),
    GgufFamily(
        "ernie4_5-moe",
        "ernie4_5_moe",
        (
            *r.PLAIN,
            *r.GATED,
            *r.EXPERTS,
            *r.SHARED_EXPERTS,
            r.layer("mlp.gate.moe_statics.e_score_correction_bias", "exp_probs_b", "line"),
        ),
        reads=("one bias", "to the last layer"),
        fields=(
            Field("expert_count", "moe_num_experts"),
            Field("expert_used_count", "moe_k"),
            Field("expert_feed_forward_length", "moe_intermediate_size"),
            Field("interleave_moe_layer_step", "moe_layer_interval", 1),
            Field("leading_dense_block_count", "moe_layer_start_index", 0),
            Field("expert_shared_count", "moe_num_shared_experts", 0),
        ),
    ),
    GgufFamily(
        "exaone-moe",
        "exaone_moe",
        (*r.PLAIN, *r.head_norms(), *r.GATED, *r.EXPERTS, *r.SHARED_EXPERTS),
        reads=("draft layers", "window in some", "sigmoid", "dense first", "shared width"),
        fields=(
            *COUNTS,
            *GROUPS,
            _NORMED,
            Field("expert_shared_count", "num_shared_experts", 1),
            Field("expert_weights_scale", "routed_scaling_factor", 1.0, float),
        ),
        kinds=(DENSE_OR_SPARSE,),
    ),
    GgufFamily(
        "hy_v3",
        "hy_v3",
        (
            *r.PLAIN,
            *r.head_norms(),
            *r.GATED,
            *r.EXPERTS,
            *r.SHARED_EXPERTS,
            r.layer("mlp.e_score_correction_bias", "exp_probs_b!"),
            r.layer("mlp.e_score_correction_bias", "exp_probs_b"),
        ),
        reads=("draft layers", "sigmoid", "dense first", "shared by width", "even weights"),
        fields=(*COUNTS, Field("expert_weights_scale", "router_scaling_factor", 1.0, float)),
        kinds=(DENSE_OR_SPARSE,),
    ),
    GgufFamily(
        "cohere2moe",
        "cohere2_moe",
        (*r.top(), *r.attention(), r.layer("input_layernorm", "attn_norm"), *r.GATED, *r.EXPERTS, *r.SHARED_EXPERTS),
        layer_norm="layer_norm_eps",
        reads=("draft layers", "logit scale", "window in some", "dense first", "average of experts"),
        fields=(
            Field("expert_count", "num_experts"),
            Field("expert_used_count", "num_experts_per_tok"),
            Field("expert_feed_forward_length", "intermediate_size"),
            Field("expert_shared_count", "num_shared_experts", 0),
            _NORMED,
        ),
        constants=(("shared_expert_combination_strategy", "average"), ("rms_norm_eps", None)),
        lacks=frozenset({"feed_forward_length"}),
        kinds=(DENSE_OR_SPARSE,),
    ),
    GgufFamily(
        "afmoe",
        "afmoe",
        (
            *r.top(),
            *r.attention(),
            *r.head_norms(),
            *r.LATE_NORMS,
            r.layer("self_attn.gate_proj", "attn_gate"),
            r.layer("input_layernorm", "attn_norm"),
            r.layer("pre_mlp_layernorm", "ffn_norm"),
            r.layer("post_mlp_layernorm", "post_ffw_norm"),
            *r.GATED,
            *r.EXPERTS,
            *r.SHARED_EXPERTS,
            r.layer("mlp.router.gate", "ffn_gate_inp"),
            r.layer("mlp.expert_bias", "exp_probs_b"),
        ),
        reads=("window in some", "sigmoid", "even weights"),
        fields=(
            *COUNTS,
            Field("expert_shared_count", "num_shared_experts", 0),
            Field("leading_dense_block_count", "num_dense_layers", 0),
            Field("expert_weights_scale", "route_scale", 1.0, float),
        ),
        constants=(("mup_enabled", True),),
    ),
    GgufFamily(
        "laguna",
        "laguna",
        (*r.PLAIN, *r.head_norms(), r.layer("self_attn.g_proj", "attn_gate"), *r.GATED, *r.EXPERTS, *r.SHARED_EXPERTS),
        reads=("sigmoid", "dense first", "even weights"),
        fields=(
            *COUNTS,
            Field("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
            Field("expert_weights_scale", "moe_routed_scaling_factor", 1.0, float),
        ),
        constants=(("moe_apply_router_weight_on_input", False), ("moe_router_logit_softcapping", 0.0)),
        lacks=frozenset({"attention.head_count", "rope"}),
        kinds=(DENSE_OR_SPARSE,),
        layout="varied",
    ),
    GgufFamily(
        "mimo2",
        "mimo_v2_flash",
        (*r.PLAIN, r.layer("self_attn.sinks", "attn_sinks"), *r.GATED, *r.EXPERTS, *r.SHARED_EXPERTS),
        reads=("draft layers", "dense first", "sigmoid"),
        fields=(
            Field("expert_count", "n_routed_experts"),
            *COUNTS[1:],
            *GROUPS,
            Field("expert_weights_norm", "norm_topk_prob", True, bool),
            Field("expert_weights_scale", "routed_scaling_factor", 1.0, float),
            Field("attention.value_scale", "attention_value_scale", 1.0, float),
        ),
        lacks=frozenset({"rope"}),
        kinds=(DENSE_OR_SPARSE,),
        layout="paired kinds",
    ),
    GgufFamily(
        "llama4",
        "llama4_text",
        (
            *r.PLAIN,
            r.layer("feed_forward.router", "ffn_gate_inp"),
            r.layer("feed_forward.experts.gate_up_proj", "ffn_gate_exps+ffn_up_exps", "turned"),
            r.layer("feed_forward.experts.down_proj", "ffn_down_exps", "turned"),
            r.layer("feed_forward.shared_expert.gate_proj", "ffn_gate_shexp"),
            r.layer("feed_forward.shared_expert.up_proj", "ffn_up_shexp"),
            r.layer("feed_forward.shared_expert.down_proj", "ffn_down_shexp"),
            r.layer("feed_forward.gate_proj", "ffn_gate"),
            r.layer("feed_forward.up_proj", "ffn_up"),
            r.layer("feed_forward.down_proj", "ffn_down"),
        ),
        reads=("llama 4",),
        fields=(
            Field("expert_count", "num_local_experts"),
            Field("expert_used_count", "num_experts_per_tok"),
            Field("feed_forward_length", "intermediate_size_mlp"),
            Field("expert_feed_forward_length", "intermediate_size"),
            Field("interleave_moe_layer_step", "interleave_moe_layer_step", 1),
        ),
        constants=(
            ("attention_chunk_size", 8192),
            ("floor_scale", 8192),
            ("attn_scale", 0.1),
            ("attn_temperature_tuning", True),
            ("no_rope_layer_interval", 4),
        ),
        lacks=frozenset({"feed_forward_length"}),
    ),
)
