"""The architectures of GGUF files and the families of the library that they are: names of tensors and fields of
configurations, both ways.

A rule makes a tensor of the library's model from tensors of the file. Some files hold another form than the library:
queries and keys of families that llama.cpp rotates in pairs have their rows in another order, and Gemma's norms are
stored with the one that the library adds. One table serves reading and writing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

#: How the library's form of a tensor is made: unchanged; with the rows of query or key heads in another order; minus
#: one; flattened to a line; or as the first or second half of a pair.
Change = Literal["", "query", "key", "offset", "line"]


class Rule(NamedTuple):
    """`file` names tensors of the file, several if their rows are joined; `{}` is the layer. Names lack `.weight`."""

    model: str
    file: tuple[str, ...]
    change: Change = ""


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture: the library's name of it, its tensors, and its further properties."""

    arch: str
    model_type: str
    rules: tuple[Rule, ...]
    layer_norm: str = ""  # the configuration's field, if norms are not RMS norms
    norm_eps: float = 0.0  # of such norms, if the library has it as a constant
    reads: tuple[str, ...] = ()  # names of the further fields: see `bridle.gguf.settings`
    is_alias: bool = False  # files of it are read as another architecture's model, and not written


_EMBEDDING = Rule("model.embed_tokens", ("token_embd",))
_HEAD = Rule("lm_head", ("output",))
_LAYER = "model.layers.{}."


def _layer(model: str, file: str, change: Change = "") -> Rule:
    return Rule(_LAYER + model, tuple(f"blk.{{}}.{name}" for name in file.split("+")), change)


def _top(offset: bool = False) -> tuple[Rule, ...]:
    return (_EMBEDDING, Rule("model.norm", ("output_norm",), "offset" if offset else ""), _HEAD)


def _attention(paired: bool = False) -> tuple[Rule, ...]:
    return (
        _layer("self_attn.q_proj", "attn_q", "query" if paired else ""),
        _layer("self_attn.k_proj", "attn_k", "key" if paired else ""),
        _layer("self_attn.v_proj", "attn_v"),
        _layer("self_attn.o_proj", "attn_output"),
    )


def _head_norms(offset: bool = False) -> tuple[Rule, ...]:
    change: Change = "offset" if offset else ""
    return (_layer("self_attn.q_norm", "attn_q_norm", change), _layer("self_attn.k_norm", "attn_k_norm", change))


_GATED = (
    _layer("mlp.gate_proj", "ffn_gate"),
    _layer("mlp.up_proj", "ffn_up"),
    _layer("mlp.down_proj", "ffn_down"),
)
_EXPERTS = (
    _layer("mlp.gate", "ffn_gate_inp"),
    _layer("mlp.experts.gate_up_proj", "ffn_gate_exps+ffn_up_exps"),
    _layer("mlp.experts.down_proj", "ffn_down_exps"),
)
_SHARED_EXPERT = (
    _layer("mlp.shared_expert_gate", "ffn_gate_inp_shexp", "line"),
    _layer("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    _layer("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    _layer("mlp.shared_expert.down_proj", "ffn_down_shexp"),
)
_TWO_NORMS = (_layer("input_layernorm", "attn_norm"), _layer("post_attention_layernorm", "ffn_norm"))
_FOUR_NORMS = (
    _layer("input_layernorm", "attn_norm", "offset"),
    _layer("post_attention_layernorm", "post_attention_norm", "offset"),
    _layer("pre_feedforward_layernorm", "ffn_norm", "offset"),
    _layer("post_feedforward_layernorm", "post_ffw_norm", "offset"),
)
_GEMMA_NORMS = (
    _layer("input_layernorm", "attn_norm", "offset"),
    _layer("post_attention_layernorm", "ffn_norm", "offset"),
)
_LATE_NORMS = (
    _layer("post_attention_layernorm", "post_attention_norm"),
    _layer("post_feedforward_layernorm", "post_ffw_norm"),
)
_PAIRED = (*_top(), *_attention(paired=True), *_TWO_NORMS)
_PLAIN = (*_top(), *_attention(), *_TWO_NORMS)

FAMILIES = (
    Family("llama", "llama", (*_PAIRED, *_GATED), reads=("biases",)),
    Family("llama", "mistral", (*_PAIRED, *_GATED), reads=("no window",)),
    Family("llama", "mixtral", (*_PAIRED, *_EXPERTS), reads=("experts", "no window")),
    Family("smollm3", "smollm3", (*_PAIRED, *_GATED), reads=("biases", "some unrotated")),
    Family("granite", "granite", (*_PAIRED, *_GATED), reads=("biases", "multipliers")),
    Family("qwen2", "qwen2", (*_PLAIN, *_GATED)),
    Family("qwen2moe", "qwen2_moe", (*_PLAIN, *_EXPERTS, *_SHARED_EXPERT), reads=("expert sizes", "shared expert")),
    Family("qwen3", "qwen3", (*_PLAIN, *_head_norms(), *_GATED)),
    Family("qwen3moe", "qwen3_moe", (*_PLAIN, *_head_norms(), *_EXPERTS), reads=("expert sizes", "even experts")),
    Family("gemma", "gemma", (*_top(offset=True), *_attention(), *_GEMMA_NORMS, *_GATED)),
    Family(
        "gemma2", "gemma2", (*_top(offset=True), *_attention(), *_FOUR_NORMS, *_GATED), reads=("caps", "every other")
    ),
    Family(
        "gemma3",
        "gemma3_text",
        (*_top(offset=True), *_attention(), *_head_norms(offset=True), *_FOUR_NORMS, *_GATED),
        reads=("final cap", "one in six"),
    ),
    Family(
        "phi3",
        "phi3",
        (
            *_top(),
            _layer("self_attn.qkv_proj", "attn_qkv"),
            _layer("self_attn.o_proj", "attn_output"),
            _layer("mlp.gate_up_proj", "ffn_up"),
            _layer("mlp.down_proj", "ffn_down"),
            *_TWO_NORMS,
        ),
        reads=("window", "two scalings"),
    ),
    Family("olmo", "olmo", (_EMBEDDING, _HEAD, *_attention(paired=True), *_GATED), norm_eps=1e-5, reads=("clip",)),
    Family("olmo2", "olmo2", (*_top(), *_attention(), *_head_norms(), *_LATE_NORMS, *_GATED)),
    Family(
        "olmo2",
        "olmo3",
        (*_top(), *_attention(), *_head_norms(), *_LATE_NORMS, *_GATED),
        reads=("one in four", "one rotation"),
    ),
    Family("olmoe", "olmoe", (*_PLAIN, *_head_norms(), *_EXPERTS), reads=("plain experts", "clip")),
    Family(
        "nemotron",
        "nemotron",
        (
            *_top(offset=True),
            *_attention(),
            *_GEMMA_NORMS,
            _layer("mlp.up_proj", "ffn_up"),
            _layer("mlp.down_proj", "ffn_down"),
        ),
        layer_norm="norm_eps",
        reads=("biases",),
    ),
    Family(
        "glm4",
        "glm4",
        (
            *_PLAIN,
            _layer("post_self_attn_layernorm", "post_attention_norm"),
            _layer("post_mlp_layernorm", "post_ffw_norm"),
            _layer("mlp.gate_up_proj", "ffn_up"),
            _layer("mlp.down_proj", "ffn_down"),
        ),
        reads=("attention bias",),
    ),
    Family(
        "phi2",
        "phi",
        (
            _EMBEDDING,
            Rule("model.final_layernorm", ("output_norm",)),
            _HEAD,
            _layer("self_attn.q_proj", "attn_q"),
            _layer("self_attn.k_proj", "attn_k"),
            _layer("self_attn.v_proj", "attn_v"),
            _layer("self_attn.dense", "attn_output"),
            _layer("input_layernorm", "attn_norm"),
            _layer("mlp.fc1", "ffn_up"),
            _layer("mlp.fc2", "ffn_down"),
        ),
        layer_norm="layer_norm_eps",
        reads=("no head norms",),
    ),
    Family(
        "seed_oss",
        "seed_oss",
        (
            *_top(),
            *_attention(),
            _layer("input_layernorm", "attn_norm"),
            _layer("post_attention_layernorm", "post_attention_norm"),
            *_GATED,
        ),
        reads=("output bias",),
    ),
    Family(
        "starcoder2",
        "starcoder2",
        (*_PLAIN, _layer("mlp.c_fc", "ffn_up"), _layer("mlp.c_proj", "ffn_down")),
        layer_norm="norm_epsilon",
    ),
    Family("stablelm", "stablelm", (*_PLAIN, *_GATED), layer_norm="layer_norm_eps", reads=("query bias",)),
    Family(
        "command-r",
        "cohere",
        (*_top(), *_attention(), _layer("input_layernorm", "attn_norm"), *_GATED),
        layer_norm="layer_norm_eps",
        reads=("logit scale",),
    ),
    Family(
        "cohere2",
        "cohere2",
        (*_top(), *_attention(), _layer("input_layernorm", "attn_norm"), *_GATED),
        layer_norm="layer_norm_eps",
        reads=("logit scale", "one in four"),
    ),
    Family(
        "arcee",
        "arcee",
        (*_PAIRED, _layer("mlp.up_proj", "ffn_up"), _layer("mlp.down_proj", "ffn_down")),
        reads=("biases",),
    ),
    Family("ernie4_5", "ernie4_5", (*_PLAIN, *_GATED), reads=("one bias",)),
    # The texts of models that see: three numbers of a position are the same for each of their tokens.
    Family("qwen2vl", "qwen2", (*_PLAIN, *_GATED), reads=("three positions",), is_alias=True),
    Family("qwen3vl", "qwen3", (*_PLAIN, *_head_norms(), *_GATED), reads=("three positions",), is_alias=True),
    Family(
        "qwen3vlmoe",
        "qwen3_moe",
        (*_PLAIN, *_head_norms(), *_EXPERTS),
        reads=("expert sizes", "even experts", "three positions"),
        is_alias=True,
    ),
    # Models that the library lacks, which compute what Llama does.
    Family("internlm2", "llama", (*_PAIRED, *_GATED), reads=("biases",), is_alias=True),
    Family("xverse", "llama", (*_PAIRED, *_GATED), reads=("biases",), is_alias=True),
    Family("exaone", "llama", (*_PLAIN, *_GATED), reads=("biases",), is_alias=True),
)

BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES if not family.is_alias}

#: Tensors that describe the rotation of positions, and tensors that are not needed here.
ROTATION_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def family_of(arch: str | None, has_experts: bool, has_window: bool) -> Family | None:
    """The family of an architecture; Mixtral is Llama with experts, OLMo 3 is OLMo 2 with a window, and Mistral cannot
    be told from Llama."""
    if arch == "llama":
        return BY_MODEL_TYPE["mixtral" if has_experts else "llama"]
    if arch == "olmo2":
        return BY_MODEL_TYPE["olmo3" if has_window else "olmo2"]
    return next((family for family in FAMILIES if family.arch == arch), None)


def known_architectures() -> list[str]:
    return sorted({family.arch for family in FAMILIES})
