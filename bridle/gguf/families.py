"""A table of GGUF architectures and their model families in transformers, with tensor names and configuration fields.
Reading and writing use the same table.
"""

from __future__ import annotations

from bridle.gguf import rules as r
from bridle.gguf.expert_families import EXPERT_FAMILIES
from bridle.gguf.family import GgufFamily
from bridle.gguf.fields import Field
from bridle.gguf.latent_families import LATENT_FAMILIES
from bridle.gguf.older_families import OLDER_FAMILIES
from bridle.gguf.recurrent_families import RECURRENT_FAMILIES

FAMILIES = (
    GgufFamily("llama", "llama", (*r.PAIRED, *r.GATED), reads=("biases",)),
    GgufFamily("llama", "mistral", (*r.PAIRED, *r.GATED), reads=("no window",)),
    GgufFamily("llama", "mixtral", (*r.PAIRED, *r.EXPERTS), reads=("experts", "no window")),
    GgufFamily("mistral3", "ministral3", (*r.PAIRED, *r.GATED), reads=("no window", "temperature")),
    GgufFamily("smollm3", "smollm3", (*r.PAIRED, *r.GATED), reads=("biases", "some unrotated")),
    GgufFamily("granite", "granite", (*r.PAIRED, *r.GATED), reads=("biases", "multipliers")),
    GgufFamily("qwen2", "qwen2", (*r.PLAIN, *r.GATED)),
    GgufFamily(
        "qwen2moe", "qwen2_moe", (*r.PLAIN, *r.EXPERTS, *r.SHARED_EXPERT), reads=("expert sizes", "shared expert")
    ),
    GgufFamily("qwen3", "qwen3", (*r.PLAIN, *r.head_norms(), *r.GATED)),
    GgufFamily(
        "qwen3moe", "qwen3_moe", (*r.PLAIN, *r.head_norms(), *r.EXPERTS), reads=("expert sizes", "even experts")
    ),
    GgufFamily("gemma", "gemma", (*r.top(offset=True), *r.attention(), *r.GEMMA_NORMS, *r.GATED)),
    GgufFamily(
        "gemma2",
        "gemma2",
        (*r.top(offset=True), *r.attention(), *r.FOUR_NORMS, *r.GATED),
        reads=("caps", "every other"),
    ),
    GgufFamily(
        "gemma3",
        "gemma3_text",
        (*r.top(offset=True), *r.attention(), *r.head_norms(offset=True), *r.FOUR_NORMS, *r.GATED),
        reads=("final cap", "one in six"),
    ),
    GgufFamily(
        "gemma4",
        "gemma4_text",
        (*r.top(), *r.attention(), *r.head_norms(), *r.MIXED, *r.GATED),
        reads=("final cap",),
        lacks=frozenset({"feed_forward_length"}),
        layout="mixed",
    ),
    GgufFamily(
        "phi3",
        "phi3",
        (
            *r.top(),
            r.layer("self_attn.qkv_proj", "attn_qkv"),
            r.layer("self_attn.o_proj", "attn_output"),
            *r.JOINED,
            *r.TWO_NORMS,
        ),
        reads=("window", "two scalings"),
    ),
    GgufFamily(
        "olmo", "olmo", (r.EMBEDDING, r.HEAD, *r.attention(paired=True), *r.GATED), norm_eps=1e-5, reads=("clip",)
    ),
    GgufFamily("olmo2", "olmo2", (*r.top(), *r.attention(), *r.head_norms(), *r.LATE_NORMS, *r.GATED)),
    GgufFamily(
        "olmo2",
        "olmo3",
        (*r.top(), *r.attention(), *r.head_norms(), *r.LATE_NORMS, *r.GATED),
        reads=("one in four", "one rotation"),
    ),
    GgufFamily("olmoe", "olmoe", (*r.PLAIN, *r.head_norms(), *r.EXPERTS), reads=("plain experts", "clip")),
    GgufFamily(
        "nemotron",
        "nemotron",
        (*r.top(offset=True), *r.attention(), *r.GEMMA_NORMS, *r.UNGATED),
        layer_norm="norm_eps",
        reads=("biases",),
    ),
    GgufFamily(
        "glm4",
        "glm4",
        (
            *r.PLAIN,
            r.layer("post_self_attn_layernorm", "post_attention_norm"),
            r.layer("post_mlp_layernorm", "post_ffw_norm"),
            *r.JOINED,
        ),
        reads=("attention bias",),
    ),
    GgufFamily("chatglm", "glm", (*r.PLAIN, *r.JOINED), reads=("attention bias", "half rotated")),
    GgufFamily(
        "granite_swa",
        "granite_swa",
        (*r.PAIRED, r.layer("self_attn.sinks", "attn_sinks"), *r.GATED),
        reads=("biases", "multipliers", "window in some", "layers with a rotation"),
    ),
    GgufFamily(
        "phi2",
        "phi",
        (
            r.EMBEDDING,
            r.TensorRule("model.final_layernorm", ("output_norm",)),
            r.HEAD,
            r.layer("self_attn.q_proj", "attn_q"),
            r.layer("self_attn.k_proj", "attn_k"),
            r.layer("self_attn.v_proj", "attn_v"),
            r.layer("self_attn.dense", "attn_output"),
            r.layer("input_layernorm", "attn_norm"),
            r.layer("mlp.fc1", "ffn_up"),
            r.layer("mlp.fc2", "ffn_down"),
        ),
        layer_norm="layer_norm_eps",
        reads=("no head norms",),
    ),
    GgufFamily("seed_oss", "seed_oss", (*r.top(), *r.attention(), *r.MIDDLE_NORMS, *r.GATED), reads=("output bias",)),
    GgufFamily(
        "starcoder2",
        "starcoder2",
        (*r.PLAIN, r.layer("mlp.c_fc", "ffn_up"), r.layer("mlp.c_proj", "ffn_down")),
        layer_norm="norm_epsilon",
    ),
    GgufFamily("stablelm", "stablelm", (*r.PLAIN, *r.GATED), layer_norm="layer_norm_eps", reads=("query bias",)),
    GgufFamily(
        "command-r",
        "cohere",
        (*r.top(), *r.attention(), r.layer("input_layernorm", "attn_norm"), *r.GATED),
        layer_norm="layer_norm_eps",
        reads=("logit scale",),
    ),
    GgufFamily(
        "cohere2",
        "cohere2",
        (*r.top(), *r.attention(), r.layer("input_layernorm", "attn_norm"), *r.GATED),
        layer_norm="layer_norm_eps",
        reads=("logit scale", "one in four"),
    ),
    GgufFamily("arcee", "arcee", (*r.PAIRED, *r.UNGATED), reads=("biases",)),
    GgufFamily("jais2", "jais2", (*r.PLAIN, *r.UNGATED), layer_norm="layer_norm_eps", reads=("biases",)),
    GgufFamily(
        "gemma3n",
        "gemma3n_text",
        (*r.top(), *r.attention(), *r.head_norms(), *r.MIXED, *r.GATED, *r.ALTERED),
        reads=("final cap", "window in some", "two rotations", "altered inputs"),
        fields=(
            Field("altup.num_inputs", "altup_num_inputs"),
            Field("altup.active_idx", "altup_active_idx", 0),
            Field("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
            Field("attention.shared_kv_layers", "num_kv_shared_layers", 0),
        ),
        constants=(("altup_correct_scale", True),),
        lacks=frozenset({"feed_forward_length", "rope"}),
    ),
    GgufFamily(
        "apertus",
        "apertus",
        (
            *r.top(),
            *r.attention(),
            *r.head_norms(),
            r.layer("attention_layernorm", "attn_norm"),
            r.layer("feedforward_layernorm", "ffn_norm"),
            *r.UNGATED,
            *(r.listed(f"mlp.act_fn.{name}", f"xielu.{name}") for name in ("alpha_p", "alpha_n", "beta", "eps")),
        ),
        reads=("biases",),
    ),
    GgufFamily(
        "gpt-oss",
        "gpt_oss",
        (*r.top(), *r.attention(), r.layer("self_attn.sinks", "attn_sinks"), *r.MIDDLE_NORMS, *r.WOVEN_EXPERTS),
        reads=("attention bias", "experts", "experts like layers", "clamped gates", "alternating", "whole ramp"),
    ),
    GgufFamily(
        "glm4moe",
        "glm4_moe",
        (*r.top(), *r.attention(), *r.head_norms(), *r.MIDDLE_NORMS, *r.GATED, *r.EXPERTS, *r.SHARED_EXPERTS),
        reads=("draft layers", "attention bias", "head norms or none", "half rotated", "shared experts", "sigmoid"),
    ),
    GgufFamily(
        "dots1",
        "dots1",
        (*r.PLAIN, *r.head_norms(), *r.GATED, *r.EXPERTS, *r.SHARED_EXPERTS),
        reads=("shared experts", "sigmoid"),
    ),
    GgufFamily(
        "minimax-m2",
        "minimax_m2",
        (*r.PLAIN, *r.head_norms(), *r.EXPERTS, r.layer("mlp.e_score_correction_bias", "exp_probs_b")),
        reads=("experts", "experts like layers", "sigmoid"),
    ),
    GgufFamily(
        "exaone4",
        "exaone4",
        (*r.top(), *r.attention(), *r.head_norms(), *r.LATE_NORMS, *r.GATED),
        reads=("window in some",),
    ),
    GgufFamily(
        "hunyuan-dense", "hunyuan_v1_dense", (*r.PLAIN, *r.LATE_HEAD_NORMS, *r.GATED), reads=("attention bias",)
    ),
    GgufFamily(
        "hunyuan-moe",
        "hunyuan_v1_moe",
        (*r.PLAIN, *r.LATE_HEAD_NORMS, *r.EXPERTS, *r.SHARED_MLP),
        reads=("attention bias", "experts like layers", "shared like layers"),
    ),
    *LATENT_FAMILIES,
    GgufFamily("ernie4_5", "ernie4_5", (*r.PLAIN, *r.GATED), reads=("one bias",)),
    *EXPERT_FAMILIES,
    *RECURRENT_FAMILIES,
    *OLDER_FAMILIES,
    # Text parts of vision models: a text token has the same number three times as its position.
    GgufFamily("qwen2vl", "qwen2", (*r.PLAIN, *r.GATED), reads=("three positions",), is_alias=True),
    GgufFamily("qwen3vl", "qwen3", (*r.PLAIN, *r.head_norms(), *r.GATED), reads=("three positions",), is_alias=True),
    GgufFamily(
        "qwen3vlmoe",
        "qwen3_moe",
        (*r.PLAIN, *r.head_norms(), *r.EXPERTS),
        reads=("expert sizes", "even experts", "three positions"),
        is_alias=True,
    ),
    # Models that transformers lacks, which compute the same as Granite or Llama.
    GgufFamily(
        "minicpm",
        "granite",
        (*r.PAIRED, *r.GATED),
        reads=("biases", "fewer multipliers", "read scalings"),
        is_alias=True,
    ),
    GgufFamily("internlm2", "llama", (*r.PAIRED, *r.GATED), reads=("biases",), is_alias=True),
    GgufFamily("xverse", "llama", (*r.PAIRED, *r.GATED), reads=("biases",), is_alias=True),
    GgufFamily("exaone", "llama", (*r.PLAIN, *r.GATED), reads=("biases",), is_alias=True),
)

BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES if not family.is_alias}

#: Tensors that describe the scaling of rotary positions, and tensors that bridle does not need.
ROTATION_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def known_architectures() -> list[str]:
    return sorted({family.arch for family in FAMILIES})
