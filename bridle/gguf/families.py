"""The architectures of GGUF files and the families of the library that they are: names of tensors and fields of
configurations, both ways. One table serves reading and writing.
"""

from __future__ import annotations

from bridle.gguf.expert_families import EXPERT_FAMILIES
from bridle.gguf.family import GgufFamily
from bridle.gguf.fields import Field
from bridle.gguf.latent_families import LATENT_FAMILIES
from bridle.gguf.older_families import OLDER_FAMILIES
from bridle.gguf.recurrent_families import RECURRENT_FAMILIES
from bridle.gguf.rules import (
    ALTERED,
    EMBEDDING,
    EXPERTS,
    FOUR_NORMS,
    GATED,
    GEMMA_NORMS,
    HEAD,
    LATE_HEAD_NORMS,
    LATE_NORMS,
    MIDDLE_NORMS,
    MIXED,
    PAIRED,
    PLAIN,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    SHARED_MLP,
    TWO_NORMS,
    WOVEN_EXPERTS,
    TensorRule,
    attention,
    head_norms,
    layer,
    listed,
    top,
)

FAMILIES = (
    GgufFamily("llama", "llama", (*PAIRED, *GATED), reads=("biases",)),
    GgufFamily("llama", "mistral", (*PAIRED, *GATED), reads=("no window",)),
    GgufFamily("llama", "mixtral", (*PAIRED, *EXPERTS), reads=("experts", "no window")),
    GgufFamily("mistral3", "ministral3", (*PAIRED, *GATED), reads=("no window", "temperature")),
    GgufFamily("smollm3", "smollm3", (*PAIRED, *GATED), reads=("biases", "some unrotated")),
    GgufFamily("granite", "granite", (*PAIRED, *GATED), reads=("biases", "multipliers")),
    GgufFamily("qwen2", "qwen2", (*PLAIN, *GATED)),
    GgufFamily("qwen2moe", "qwen2_moe", (*PLAIN, *EXPERTS, *SHARED_EXPERT), reads=("expert sizes", "shared expert")),
    GgufFamily("qwen3", "qwen3", (*PLAIN, *head_norms(), *GATED)),
    GgufFamily("qwen3moe", "qwen3_moe", (*PLAIN, *head_norms(), *EXPERTS), reads=("expert sizes", "even experts")),
    GgufFamily("gemma", "gemma", (*top(offset=True), *attention(), *GEMMA_NORMS, *GATED)),
    GgufFamily(
        "gemma2", "gemma2", (*top(offset=True), *attention(), *FOUR_NORMS, *GATED), reads=("caps", "every other")
    ),
    GgufFamily(
        "gemma3",
        "gemma3_text",
        (*top(offset=True), *attention(), *head_norms(offset=True), *FOUR_NORMS, *GATED),
        reads=("final cap", "one in six"),
    ),
    GgufFamily(
        "gemma4",
        "gemma4_text",
        (*top(), *attention(), *head_norms(), *MIXED, *GATED),
        reads=("final cap",),
        lacks=frozenset({"feed_forward_length"}),
        layout="mixed",
    ),
    GgufFamily(
        "phi3",
        "phi3",
        (
            *top(),
            layer("self_attn.qkv_proj", "attn_qkv"),
            layer("self_attn.o_proj", "attn_output"),
            layer("mlp.gate_up_proj", "ffn_up"),
            layer("mlp.down_proj", "ffn_down"),
            *TWO_NORMS,
        ),
        reads=("window", "two scalings"),
    ),
    GgufFamily("olmo", "olmo", (EMBEDDING, HEAD, *attention(paired=True), *GATED), norm_eps=1e-5, reads=("clip",)),
    GgufFamily("olmo2", "olmo2", (*top(), *attention(), *head_norms(), *LATE_NORMS, *GATED)),
    GgufFamily(
        "olmo2",
        "olmo3",
        (*top(), *attention(), *head_norms(), *LATE_NORMS, *GATED),
        reads=("one in four", "one rotation"),
    ),
    GgufFamily("olmoe", "olmoe", (*PLAIN, *head_norms(), *EXPERTS), reads=("plain experts", "clip")),
    GgufFamily(
        "nemotron",
        "nemotron",
        (
            *top(offset=True),
            *attention(),
            *GEMMA_NORMS,
            layer("mlp.up_proj", "ffn_up"),
            layer("mlp.down_proj", "ffn_down"),
        ),
        layer_norm="norm_eps",
        reads=("biases",),
    ),
    GgufFamily(
        "glm4",
        "glm4",
        (
            *PLAIN,
            layer("post_self_attn_layernorm", "post_attention_norm"),
            layer("post_mlp_layernorm", "post_ffw_norm"),
            layer("mlp.gate_up_proj", "ffn_up"),
            layer("mlp.down_proj", "ffn_down"),
        ),
        reads=("attention bias",),
    ),
    GgufFamily(
        "chatglm",
        "glm",
        (*PLAIN, layer("mlp.gate_up_proj", "ffn_up"), layer("mlp.down_proj", "ffn_down")),
        reads=("attention bias", "half rotated"),
    ),
    GgufFamily(
        "granite_swa",
        "granite_swa",
        (*PAIRED, layer("self_attn.sinks", "attn_sinks"), *GATED),
        reads=("biases", "multipliers", "window in some", "layers with a rotation"),
    ),
    GgufFamily(
        "phi2",
        "phi",
        (
            EMBEDDING,
            TensorRule("model.final_layernorm", ("output_norm",)),
            HEAD,
            layer("self_attn.q_proj", "attn_q"),
            layer("self_attn.k_proj", "attn_k"),
            layer("self_attn.v_proj", "attn_v"),
            layer("self_attn.dense", "attn_output"),
            layer("input_layernorm", "attn_norm"),
            layer("mlp.fc1", "ffn_up"),
            layer("mlp.fc2", "ffn_down"),
        ),
        layer_norm="layer_norm_eps",
        reads=("no head norms",),
    ),
    GgufFamily(
        "seed_oss",
        "seed_oss",
        (*top(), *attention(), *MIDDLE_NORMS, *GATED),
        reads=("output bias",),
    ),
    GgufFamily(
        "starcoder2",
        "starcoder2",
        (*PLAIN, layer("mlp.c_fc", "ffn_up"), layer("mlp.c_proj", "ffn_down")),
        layer_norm="norm_epsilon",
    ),
    GgufFamily("stablelm", "stablelm", (*PLAIN, *GATED), layer_norm="layer_norm_eps", reads=("query bias",)),
    GgufFamily(
        "command-r",
        "cohere",
        (*top(), *attention(), layer("input_layernorm", "attn_norm"), *GATED),
        layer_norm="layer_norm_eps",
        reads=("logit scale",),
    ),
    GgufFamily(
        "cohere2",
        "cohere2",
        (*top(), *attention(), layer("input_layernorm", "attn_norm"), *GATED),
        layer_norm="layer_norm_eps",
        reads=("logit scale", "one in four"),
    ),
    GgufFamily(
        "arcee",
        "arcee",
        (*PAIRED, layer("mlp.up_proj", "ffn_up"), layer("mlp.down_proj", "ffn_down")),
        reads=("biases",),
    ),
    GgufFamily(
        "jais2",
        "jais2",
        (*PLAIN, layer("mlp.up_proj", "ffn_up"), layer("mlp.down_proj", "ffn_down")),
        layer_norm="layer_norm_eps",
        reads=("biases",),
    ),
    GgufFamily(
        "gemma3n",
        "gemma3n_text",
        (*top(), *attention(), *head_norms(), *MIXED, *GATED, *ALTERED),
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
            *top(),
            *attention(),
            *head_norms(),
            layer("attention_layernorm", "attn_norm"),
            layer("feedforward_layernorm", "ffn_norm"),
            layer("mlp.up_proj", "ffn_up"),
            layer("mlp.down_proj", "ffn_down"),
            *(listed(f"mlp.act_fn.{name}", f"xielu.{name}") for name in ("alpha_p", "alpha_n", "beta", "eps")),
        ),
        reads=("biases",),
    ),
    GgufFamily(
        "gpt-oss",
        "gpt_oss",
        (*top(), *attention(), layer("self_attn.sinks", "attn_sinks"), *MIDDLE_NORMS, *WOVEN_EXPERTS),
        reads=("attention bias", "experts", "experts like layers", "clamped gates", "alternating", "whole ramp"),
    ),
    GgufFamily(
        "glm4moe",
        "glm4_moe",
        (*top(), *attention(), *head_norms(), *MIDDLE_NORMS, *GATED, *EXPERTS, *SHARED_EXPERTS),
        reads=("draft layers", "attention bias", "head norms or none", "half rotated", "shared experts", "sigmoid"),
    ),
    GgufFamily(
        "dots1",
        "dots1",
        (*PLAIN, *head_norms(), *GATED, *EXPERTS, *SHARED_EXPERTS),
        reads=("shared experts", "sigmoid"),
    ),
    GgufFamily(
        "minimax-m2",
        "minimax_m2",
        (*PLAIN, *head_norms(), *EXPERTS, layer("mlp.e_score_correction_bias", "exp_probs_b")),
        reads=("experts", "experts like layers", "sigmoid"),
    ),
    GgufFamily(
        "exaone4",
        "exaone4",
        (*top(), *attention(), *head_norms(), *LATE_NORMS, *GATED),
        reads=("window in some",),
    ),
    GgufFamily("hunyuan-dense", "hunyuan_v1_dense", (*PLAIN, *LATE_HEAD_NORMS, *GATED), reads=("attention bias",)),
    GgufFamily(
        "hunyuan-moe",
        "hunyuan_v1_moe",
        (*PLAIN, *LATE_HEAD_NORMS, *EXPERTS, *SHARED_MLP),
        reads=("attention bias", "experts like layers", "shared like layers"),
    ),
    *LATENT_FAMILIES,
    GgufFamily("ernie4_5", "ernie4_5", (*PLAIN, *GATED), reads=("one bias",)),
    *EXPERT_FAMILIES,
    *RECURRENT_FAMILIES,
    *OLDER_FAMILIES,
    # The texts of models that see: three numbers of a position are the same for each of their tokens.
    GgufFamily("qwen2vl", "qwen2", (*PLAIN, *GATED), reads=("three positions",), is_alias=True),
    GgufFamily("qwen3vl", "qwen3", (*PLAIN, *head_norms(), *GATED), reads=("three positions",), is_alias=True),
    GgufFamily(
        "qwen3vlmoe",
        "qwen3_moe",
        (*PLAIN, *head_norms(), *EXPERTS),
        reads=("expert sizes", "even experts", "three positions"),
        is_alias=True,
    ),
    # Models that the library lacks, which compute what Granite or Llama does.
    GgufFamily(
        "minicpm", "granite", (*PAIRED, *GATED), reads=("biases", "fewer multipliers", "read scalings"), is_alias=True
    ),
    GgufFamily("internlm2", "llama", (*PAIRED, *GATED), reads=("biases",), is_alias=True),
    GgufFamily("xverse", "llama", (*PAIRED, *GATED), reads=("biases",), is_alias=True),
    GgufFamily("exaone", "llama", (*PLAIN, *GATED), reads=("biases",), is_alias=True),
)

BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES if not family.is_alias}

#: Tensors that describe the rotation of positions, and tensors that are not needed here.
ROTATION_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def known_architectures() -> list[str]:
    return sorted({family.arch for family in FAMILIES})
