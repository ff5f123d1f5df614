"""Properties of mixture-of-experts families that `bridle.gguf.traits` does not read. Examples are clamped gates, dense
first layers, shared experts, and routing methods."""

from __future__ import annotations

from typing import Any

from bridle.errors import UnsupportedModel
from bridle.gguf.fields import MAX_SIDE, Config, Put, Reader, Writer, read_nothing, write_nothing
from bridle.gguf.shards import GgufModel


def _read_like_layers(model: GgufModel, arch: str, config: Config) -> None:
    """Read the MLP width of experts, which must equal the MLP width of layers without experts."""
    width = model.integer(f"{arch}.expert_feed_forward_length", config["intermediate_size"], 1, MAX_SIDE)
    if width != config["intermediate_size"]:
        raise UnsupportedModel(
            f"{model.path} has experts of width {width} and a feed-forward length of {config['intermediate_size']}; "
            "both must be the same"
        )


def _write_like_layers(config: Any, put: Put) -> None:
    put("expert_feed_forward_length", int(config.intermediate_size))


def _write_clamped_gates(config: Any, put: Put) -> None:
    if (config.swiglu_alpha, config.swiglu_limit) != (1.702, 7.0):
        raise UnsupportedModel(
            f"swiglu_alpha {config.swiglu_alpha} and swiglu_limit {config.swiglu_limit} cannot be stored in a GGUF file"
        )


def read_draft_layers(model: GgufModel, arch: str, config: Config) -> None:
    """Subtract the file's last layers, which only propose draft tokens, from the number of layers. Layers that propose
    draft tokens are not computed by bridle."""
    config["num_hidden_layers"] -= model.integer(f"{arch}.nextn_predict_layers", 0, 0, config["num_hidden_layers"] - 1)
    config["num_nextn_predict_layers"] = 0


def draft_tensors(model: GgufModel, num_layers: int) -> set[str]:
    """Return the names of the tensors of draft layers. `num_layers` does not count the draft layers."""
    arch = model.text("general.architecture")
    if not model.integer(f"{arch}.nextn_predict_layers", 0):
        return set()
    last = model.integer(f"{arch}.block_count", num_layers, 0, len(model.tensors))
    prefixes = tuple(f"blk.{number}." for number in range(num_layers, last))
    return {name for name in model.tensors if name.startswith(prefixes)}


#: Field by key for the number of shared experts, in addition to one that all tokens use.
_SHARED_COUNTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
}
_GROUP_COUNTS = {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"}


def _read_shared_experts(model: GgufModel, arch: str, config: Config) -> None:
    for key, field in _SHARED_COUNTS.items():
        least = int(field != "first_k_dense_replace")
        config[field] = model.integer(f"{arch}.{key}", None if least else 0, least, MAX_SIDE)
    for key, field in _GROUP_COUNTS.items():
        config[field] = model.integer(f"{arch}.{key}", 1, 1, 1 << 16)
    count, groups = config["n_routed_experts"], config["n_group"]
    if not config["num_experts_per_tok"] <= count <= 1 << 16 or count % groups or config["topk_group"] > groups:
        raise UnsupportedModel(
            f"{model.path} selects {config['num_experts_per_tok']} of {count} experts from {config['topk_group']} of "
            f"{groups} groups, which is impossible"
        )
    config["routed_scaling_factor"] = model.real(f"{arch}.expert_weights_scale", 1.0)
    config["norm_topk_prob"] = model.flag(f"{arch}.expert_weights_norm", False)


def _write_shared_experts(config: Any, put: Put) -> None:
    for key, field in _SHARED_COUNTS.items():
        put(key, int(getattr(config, field)))
    for key, field in _GROUP_COUNTS.items():
        put(key, int(getattr(config, field) or 1))
    put("expert_weights_scale", float(config.routed_scaling_factor))
    put("expert_weights_norm", bool(config.norm_topk_prob))


#: The methods of choosing experts, by the numbers in files.
SOFTMAX, SIGMOID = 1, 2


def _read_sigmoid(model: GgufModel, arch: str, config: Config) -> None:
    kind = model.integer(f"{arch}.expert_gating_func", SIGMOID)
    if kind != SIGMOID:
        raise UnsupportedModel(f"{model.path}: expert_gating_func is {kind}; experts of {arch} need {SIGMOID}")


def _write_sigmoid(config: Any, put: Put) -> None:
    put("expert_gating_func", SIGMOID)


def _read_softmax(model: GgufModel, arch: str, config: Config) -> None:
    kind = model.integer(f"{arch}.expert_gating_func", SOFTMAX)
    if kind not in (0, SOFTMAX) or config["norm_topk_prob"]:
        raise UnsupportedModel(f"{model.path}: this expert gating of {arch} is not supported")
    config["topk_method"] = _method(config["n_group"])


def _write_softmax(config: Any, put: Put) -> None:
    if config.norm_topk_prob or config.topk_method != _method(config.n_group or 1):
        raise UnsupportedModel(f"a model with topk_method {config.topk_method!r} cannot be stored in a GGUF file")
    put("expert_gating_func", SOFTMAX)


def _read_clamped_experts(model: GgufModel, arch: str, config: Config) -> None:
    limits = {float(each) for each in model.numbers(f"{arch}.swiglu_clamp_exp")[: config["num_hidden_layers"]]}
    if len(limits) != 1 or 0.0 in limits:
        raise UnsupportedModel(f"{model.path}: {arch}.swiglu_clamp_exp must be the same limit in all layers")
    config["swiglu_limit"] = limits.pop()


def _write_clamped_experts(config: Any, put: Put) -> None:
    put("swiglu_clamp_exp", [float(config.swiglu_limit)] * config.num_hidden_layers)


def _method(num_groups: int) -> str:
    return "group_limited_greedy" if num_groups > 1 else "greedy"


def _read_shared_like_layers(model: GgufModel, arch: str, config: Config) -> None:
    """Read Hunyuan's experts. One additional expert processes all tokens, and has the width of the other experts."""
    config["num_experts"] = model.integer(f"{arch}.expert_count", low=1, high=1 << 16)
    config["moe_topk"] = model.integer(f"{arch}.expert_used_count", low=1, high=config["num_experts"])
    width = model.integer(f"{arch}.expert_shared_feed_forward_length", config["intermediate_size"], 0, MAX_SIDE)
    if width != config["intermediate_size"] or model.integer(f"{arch}.expert_shared_count", 1) != 1:
        raise UnsupportedModel(f"{model.path} must have one shared expert, of width {config['intermediate_size']}")


def _write_shared_like_layers(config: Any, put: Put) -> None:
    if not isinstance(config.moe_topk, int) or not isinstance(config.num_experts, int):
        raise UnsupportedModel("expert counts that differ between layers cannot be written to a GGUF file")
    put("expert_count", config.num_experts)
    put("expert_used_count", config.moe_topk)
    put("expert_shared_feed_forward_length", int(config.intermediate_size))
    put("expert_shared_count", 1)


def _write_dense_first(config: Any, put: Put) -> None:
    """Write the number of layers without experts, which must be the first layers in a file."""
    dense = list(config.mlp_layer_types).count("dense")
    if list(config.mlp_layer_types) != ["dense"] * dense + ["sparse"] * (config.num_hidden_layers - dense):
        raise UnsupportedModel("a GGUF file of this family needs all layers without experts to come first")
    put("leading_dense_block_count", dense)


_SHARED_WIDTH = "expert_shared_feed_forward_length"


def _write_shared_width(config: Any, put: Put) -> None:
    put(_SHARED_WIDTH, int(config.moe_intermediate_size) * int(config.num_shared_experts))


def _read_shared_by_width(model: GgufModel, arch: str, config: Config) -> None:
    """Compute the number of experts that process all tokens from the total width of these experts, which the file
    has."""
    width = model.integer(f"{arch}.{_SHARED_WIDTH}", 0, 0, MAX_SIDE)
    if width % config["moe_intermediate_size"]:
        raise UnsupportedModel(f"{model.path}: shared experts have the width {width}, not a multiple of one expert's")
    config["num_shared_experts"] = width // config["moe_intermediate_size"]


def _read_even_weights(model: GgufModel, arch: str, config: Config) -> None:
    if not model.flag(f"{arch}.expert_weights_norm", True):
        raise UnsupportedModel(f"{model.path}: {arch} needs expert weights that add up to 1 (expert_weights_norm)")


def _write_even_weights(config: Any, put: Put) -> None:
    put("expert_weights_norm", True)


def _write_to_the_last(config: Any, put: Put) -> None:
    if config.moe_layer_end_index not in (-1, config.num_hidden_layers - 1):
        raise UnsupportedModel(f"moe_layer_end_index {config.moe_layer_end_index} cannot be stored in a GGUF file")
    put(_SHARED_WIDTH, int(config.moe_intermediate_size) * int(config.moe_num_shared_experts or 0))


_CHOICES = {SOFTMAX: "softmax", SIGMOID: "sigmoid"}


def _read_average(model: GgufModel, arch: str, config: Config) -> None:
    """Read Command A+'s experts. The results of routed and shared experts are averaged. The MLPs of layers without
    experts are wider than those of experts."""
    kind = model.integer(f"{arch}.expert_gating_func", SIGMOID, SOFTMAX, SIGMOID)
    config["expert_selection_fn"] = _CHOICES[kind]
    width = model.integer(f"{arch}.feed_forward_length", config["intermediate_size"], 1, MAX_SIDE)
    config["prefix_dense_intermediate_size"] = width


def _write_average(config: Any, put: Put) -> None:
    put("feed_forward_length", int(config.prefix_dense_intermediate_size or config.intermediate_size))
    put("expert_gating_func", {name: kind for kind, name in _CHOICES.items()}[config.expert_selection_fn])
    if config.num_shared_experts:
        put(_SHARED_WIDTH, int(config.intermediate_size) * int(config.num_shared_experts))


#: Number of experts of Llama 4's largest model, the only one without norms of queries and keys.
_WITHOUT_NORMS = 128


def _read_llama_4(model: GgufModel, arch: str, config: Config) -> None:
    if model.integer(f"{arch}.attention.sliding_window", 1) == 0:
        raise UnsupportedModel(f"{model.path}: Llama 4 without chunked attention is not supported")
    config["use_qk_norm"] = config["num_local_experts"] != _WITHOUT_NORMS


def _write_llama_4(config: Any, put: Put) -> None:
    if config.use_qk_norm != (config.num_local_experts != _WITHOUT_NORMS):
        raise UnsupportedModel(f"use_qk_norm={config.use_qk_norm} of this model cannot be stored in a GGUF file")


TRAITS: dict[str, tuple[Reader, Writer]] = {
    "dense first": (read_nothing, _write_dense_first),
    "shared width": (read_nothing, _write_shared_width),
    "shared by width": (_read_shared_by_width, _write_shared_width),
    "even weights": (_read_even_weights, _write_even_weights),
    "to the last layer": (read_nothing, _write_to_the_last),
    "average of experts": (_read_average, _write_average),
    "llama 4": (_read_llama_4, _write_llama_4),
    "experts like layers": (_read_like_layers, _write_like_layers),
    "draft layers": (read_nothing, write_nothing),
    "shared experts": (_read_shared_experts, _write_shared_experts),
    "softmax": (_read_softmax, _write_softmax),
    "clamped experts": (_read_clamped_experts, _write_clamped_experts),
    "sigmoid": (_read_sigmoid, _write_sigmoid),
    "shared like layers": (_read_shared_like_layers, _write_shared_like_layers),
    "clamped gates": (read_nothing, _write_clamped_gates),
}
