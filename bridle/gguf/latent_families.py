"""Model families that compute keys and values from one short latent vector per token: DeepSeek and related families."""

from bridle.gguf.expert_families import COUNTS, DENSE_OR_SPARSE, GROUPS
from bridle.gguf.family import GgufFamily
from bridle.gguf.fields import Field
from bridle.gguf.rules import EXPERTS, GATED, INDEXER, LATENT, SHARED_EXPERTS, TWO_NORMS, TensorRule, layer, top

_SPARSE = (*top(), *LATENT, *TWO_NORMS, *GATED, *EXPERTS, *SHARED_EXPERTS)
_INDEX = (
    Field("attention.indexer.head_count", "index_n_heads"),
    Field("attention.indexer.key_length", "index_head_dim"),
    Field("attention.indexer.top_k", "index_topk"),
)

_INDEX_KINDS = ("indexer_types", (("indexer.attn_q_b.weight", "full"), ("attn_output.weight", "shared")))
#: Rules of DeepSeek's several versions of each row, which a layer mixes before and after its computation.
_MIXED_ROWS = tuple(
    rule
    for part in ("fn", "base", "scale")
    for rule in (
        layer(f"attn_hc.{part}", f"hc_attn_{part}"),
        layer(f"ffn_hc.{part}", f"hc_ffn_{part}"),
        TensorRule(f"model.hc_head.hc_{part}", (f"output_hc_{part}",)),
    )
)

LATENT_FAMILIES = (
    GgufFamily(
        "deepseek2", "deepseek_v2", _SPARSE, reads=("draft layers", "shared experts", "softmax"), layout="latent"
    ),
    GgufFamily(
        "deepseek2", "deepseek_v3", _SPARSE, reads=("draft layers", "shared experts", "sigmoid"), layout="latent"
    ),
    GgufFamily(
        "deepseek32",
        "deepseek_v32",
        (*_SPARSE, *INDEXER),
        reads=("draft layers", "shared experts", "sigmoid"),
        fields=_INDEX,
        layout="latent",
    ),
    GgufFamily(
        "glm-dsa",
        "glm_moe_dsa",
        (*_SPARSE, *INDEXER),
        reads=("draft layers", "shared experts", "sigmoid", "index types"),
        fields=_INDEX,
        kinds=(_INDEX_KINDS,),
        layout="latent",
    ),
    GgufFamily(
        "hy_v4",
        "hy_v4",
        (
            *_SPARSE,
            *INDEXER,
            layer("self_attn.sinks", "attn_sinks"),
            layer("self_attn.gate_proj", "attn_gate"),
            *_MIXED_ROWS,
        ),
        reads=("draft layers", "sigmoid", "dense first", "index types", "clamped experts"),
        fields=(
            *_INDEX,
            Field("expert_count", "n_routed_experts"),
            *COUNTS[1:],
            Field("expert_shared_count", "n_shared_experts"),
            *GROUPS,
            Field("expert_weights_scale", "routed_scaling_factor", 1.0, float),
            Field("expert_weights_norm", "norm_topk_prob", False, bool),
            Field("hyper_connection.count", "hc_mult"),
            Field("hyper_connection.epsilon", "hc_eps", None, float),
            Field("hyper_connection.magnitude", "hc_magnitude", None, float),
        ),
        kinds=(_INDEX_KINDS, DENSE_OR_SPARSE),
        layout="latent",
    ),
    GgufFamily(
        "minicpm3",
        "minicpm3",
        (*top(), *(rule for rule in LATENT if rule.change != "latent"), *TWO_NORMS, *GATED),
        reads=("two scalings",),
        constants=(("scale_emb", 12), ("scale_depth", 1.4), ("dim_model_base", 256)),
        layout="whole latent",
    ),
)
