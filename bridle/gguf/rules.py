"""Rules that make a tensor of a transformers model from tensors of a GGUF file, and groups of rules that families
share.

Some tensors have another form in files than in transformers. For example, llama.cpp rotates heads in pairs for some
families, so their query and key rows have another order. In files, the weights of Gemma's norms already include the 1
that transformers adds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

#: The way to make the transformers form of a tensor, see `bridle.gguf.forms`. It is unchanged; minus 1; flattened; with
#: each matrix transposed; made of several tensors with alternating rows; or made of the halves of `bridle.gguf.mla`. It
#: may also be in another shape; the logarithm of a decay; a number of the metadata; or the slice whose number is in the
#: name.
Change = Literal[
    "",
    "offset",
    "line",
    "turned",
    "woven",
    "latent",
    "conv",
    "column",
    "groups",
    "decay",
    "decays",
    "rise",
    "listed",
    "slice",
]
#: Order of rows, see `bridle.gguf.rows`.
Order = Literal["", "query", "key", "values", "late values", "by key head", "by head"]


class TensorRule(NamedTuple):
    """A rule that makes one tensor for transformers. `file` names one tensor of the file, or several tensors whose rows
    are joined. `{}` stands for the layer number. `.weight` is appended to a name unless it ends in `!`. If a tensor has
    several rules, the first rule whose tensors are in the file is used."""

    model: str
    file: tuple[str, ...]
    change: Change = ""
    order: Order = ""  # of rows
    columns: Order = ""


def suffix_of(name: str) -> str:
    """Return the suffix, such as `.weight`, that the file's name has for the transformers tensor `name`."""
    return ".bias" if name.endswith("bias") else ".weight"


def file_name(file: str, layer: int, suffix: str) -> str:
    """Return the complete name of a tensor in the file, with layer number and suffix."""
    name = file.format(layer)
    return name.removesuffix("!") if name.endswith("!") else name + suffix


EMBEDDING = TensorRule("model.embed_tokens", ("token_embd",))
HEAD = TensorRule("lm_head", ("output",))
_LAYER = "model.layers.{}."


def layer(model: str, file: str, change: Change = "", order: Order = "", columns: Order = "") -> TensorRule:
    return TensorRule(_LAYER + model, tuple(f"blk.{{}}.{name}" for name in file.split("+")), change, order, columns)


def listed(model: str, key: str) -> TensorRule:
    """Return the rule for a tensor with one value per layer. The file has the values of all layers in the metadata list
    `key`."""
    return TensorRule(_LAYER + model, (key,), "listed")


def moved(rules: Iterable[TensorRule], old: str, new: str) -> tuple[TensorRule, ...]:
    """Return the same rules for a model whose tensor names in transformers have `new` instead of `old`."""
    return tuple(rule._replace(model=rule.model.replace(old, new, 1)) for rule in rules)


def top(offset: bool = False) -> tuple[TensorRule, ...]:
    return (EMBEDDING, TensorRule("model.norm", ("output_norm",), "offset" if offset else ""), HEAD)


def attention(paired: bool = False) -> tuple[TensorRule, ...]:
    return (
        layer("self_attn.q_proj", "attn_q", order="query" if paired else ""),
        layer("self_attn.k_proj", "attn_k", order="key" if paired else ""),
        layer("self_attn.v_proj", "attn_v"),
        layer("self_attn.o_proj", "attn_output"),
    )


def head_norms(offset: bool = False) -> tuple[TensorRule, ...]:
    change: Change = "offset" if offset else ""
    return (layer("self_attn.q_norm", "attn_q_norm", change), layer("self_attn.k_norm", "attn_k_norm", change))


UNGATED = (layer("mlp.up_proj", "ffn_up"), layer("mlp.down_proj", "ffn_down"))
GATED = (layer("mlp.gate_proj", "ffn_gate"), *UNGATED)
#: Gate and up projections in one matrix.
JOINED = (layer("mlp.gate_up_proj", "ffn_up"), layer("mlp.down_proj", "ffn_down"))
#: Experts with alternating rows of gates and values, transposed matrices, and biases.
WOVEN_EXPERTS = (
    layer("mlp.router", "ffn_gate_inp"),
    layer("mlp.experts.gate_up_proj", "ffn_gate_exps+ffn_up_exps", "woven"),
    layer("mlp.experts.gate_up_proj_bias", "ffn_gate_exps+ffn_up_exps", "woven"),
    layer("mlp.experts.down_proj", "ffn_down_exps", "turned"),
    layer("mlp.experts.down_proj_bias", "ffn_down_exps"),
)
EXPERTS = (
    layer("mlp.gate", "ffn_gate_inp"),
    layer("mlp.experts.gate_up_proj", "ffn_gate_exps+ffn_up_exps"),
    layer("mlp.experts.down_proj", "ffn_down_exps"),
)
SHARED_EXPERTS = (
    layer("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    layer("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    layer("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    layer("mlp.gate.e_score_correction_bias", "exp_probs_b"),
)
SHARED_MLP = (
    layer("mlp.gate.wg", "ffn_gate_inp"),
    layer("mlp.shared_mlp.gate_proj", "ffn_gate_shexp"),
    layer("mlp.shared_mlp.up_proj", "ffn_up_shexp"),
    layer("mlp.shared_mlp.down_proj", "ffn_down_shexp"),
)
SHARED_EXPERT = (
    layer("mlp.shared_expert_gate", "ffn_gate_inp_shexp", "line"),
    layer("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    layer("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    layer("mlp.shared_expert.down_proj", "ffn_down_shexp"),
)
TWO_NORMS = (layer("input_layernorm", "attn_norm"), layer("post_attention_layernorm", "ffn_norm"))
FOUR_NORMS = (
    layer("input_layernorm", "attn_norm", "offset"),
    layer("post_attention_layernorm", "post_attention_norm", "offset"),
    layer("pre_feedforward_layernorm", "ffn_norm", "offset"),
    layer("post_feedforward_layernorm", "post_ffw_norm", "offset"),
)
GEMMA_NORMS = (
    layer("input_layernorm", "attn_norm", "offset"),
    layer("post_attention_layernorm", "ffn_norm", "offset"),
)
LATENT = (
    layer("self_attn.q_proj", "attn_q"),
    layer("self_attn.q_a_proj", "attn_q_a"),
    layer("self_attn.q_a_layernorm", "attn_q_a_norm"),
    layer("self_attn.q_b_proj", "attn_q_b"),
    layer("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    layer("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    layer("self_attn.kv_b_proj", "attn_k_b+attn_v_b", "latent"),
    layer("self_attn.kv_b_proj", "attn_kv_b"),  # in older files
    layer("self_attn.o_proj", "attn_output"),
)
#: Rules of the indexer of DeepSeek V3.2 and related models, which selects keys.
INDEXER = (
    layer("self_attn.indexer.wq_b", "indexer.attn_q_b"),
    layer("self_attn.indexer.wk", "indexer.attn_k"),
    layer("self_attn.indexer.k_norm", "indexer.k_norm"),
    layer("self_attn.indexer.weights_proj", "indexer.proj"),
)
#: Rules of the norms of heads that are applied after rotation.
LATE_HEAD_NORMS = (
    layer("self_attn.query_layernorm", "attn_q_norm"),
    layer("self_attn.key_layernorm", "attn_k_norm"),
)
MIDDLE_NORMS = (
    layer("input_layernorm", "attn_norm"),
    layer("post_attention_layernorm", "post_attention_norm"),
)
#: Rules of Gemma 4: inputs of each layer, and experts next to a network.
MIXED = (
    layer("input_layernorm", "attn_norm"),
    layer("post_attention_layernorm", "post_attention_norm"),
    layer("pre_feedforward_layernorm", "ffn_norm"),
    layer("post_feedforward_layernorm", "post_ffw_norm"),
    layer("layer_scalar", "layer_output_scale"),
    TensorRule("model.embed_tokens_per_layer", ("per_layer_token_embd",)),
    TensorRule("model.per_layer_model_projection", ("per_layer_model_proj",)),
    TensorRule("model.per_layer_projection_norm", ("per_layer_proj_norm",)),
    layer("per_layer_input_gate", "inp_gate"),
    layer("per_layer_projection", "proj"),
    layer("post_per_layer_input_norm", "post_norm"),
    layer("router.proj", "ffn_gate_inp"),
    layer("router.scale", "ffn_gate_inp.scale!"),
    layer("router.per_expert_scale", "ffn_down_exps.scale!"),
    layer("experts.gate_up_proj", "ffn_gate_up_exps"),
    layer("experts.gate_up_proj", "ffn_gate_exps+ffn_up_exps"),
    layer("experts.down_proj", "ffn_down_exps"),
    layer("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
    layer("post_feedforward_layernorm_1", "post_ffw_norm_1"),
    layer("post_feedforward_layernorm_2", "post_ffw_norm_2"),
)
#: Rules of Gemma 3n: four versions of each row, and a shortcut of low rank.
ALTERED = (
    layer("altup.correct_output_scale", "altup_correct_scale"),
    layer("altup.correction_coefs", "altup_correct_coef"),
    layer("altup.prediction_coefs", "altup_predict_coef"),
    layer("altup.modality_router", "altup_router"),
    layer("altup.router_norm", "altup_router_norm"),
    layer("laurel.linear_left", "laurel_l"),
    layer("laurel.linear_right", "laurel_r"),
    layer("laurel.post_laurel_norm", "laurel_post_norm"),
    *(TensorRule(f"model.altup_projections.{number}", ("altup_proj",), "slice") for number in range(8)),
    *(TensorRule(f"model.altup_unembed_projections.{number}", ("altup_unembd_proj",), "slice") for number in range(8)),
)
LATE_NORMS = (
    layer("post_attention_layernorm", "post_attention_norm"),
    layer("post_feedforward_layernorm", "post_ffw_norm"),
)
PAIRED = (*top(), *attention(paired=True), *TWO_NORMS)
PLAIN = (*top(), *attention(), *TWO_NORMS)
