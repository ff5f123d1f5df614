"""Properties of mixture-of-experts families beyond the fields that `bridle.gguf.traits` reads: clamped gates, dense
layers before those with experts, shared experts, and routing methods."""

from __future__ import annotations

from typing import Any

from bridle.errors import UnsupportedModel
from bridle.gguf.fields import MAX_SIDE, Config, Put, Reader, Writer
from bridle.gguf.shards import GgufModel


def _read_like_layers(model: GgufModel, arch: str, config: Config) -> None:
    """Experts as wide as the layers without any would be."""
    width = model.integer(f"{arch}.expert_feed_forward_length", config["intermediate_size"], 1, MAX_SIDE)
    if width != config["intermediate_size"]:
        raise UnsupportedModel(
            f"{model.path} has experts of {width} numbers, and a feed-forward length of {config['intermediate_size']}; "
            "they are read where both are the same"
        )


def _write_like_layers(config: Any, put: Put) -> None:
    put("expert_feed_forward_length", int(config.intermediate_size))


def _read_nothing(model: GgufModel, arch: str, config: Config) -> None:
    return None


def _write_nothing(config: Any, put: Put) -> None:
    return None


def _write_clamped_gates(config: Any, put: Put) -> None:
    if (config.swiglu_alpha, config.swiglu_limit) != (1.702, 7.0):
        raise UnsupportedModel(
            f"swiglu_alpha {config.swiglu_alpha} and swiglu_limit {config.swiglu_limit} cannot be stored in a GGUF file"
        )


def read_draft_layers(model: GgufModel, arch: str, config: Config) -> None:
    """Layers after those of the model, which guess further tokens, are not computed."""
    config["num_hidden_layers"] -= model.integer(f"{arch}.nextn_predict_layers", 0, 0, config["num_hidden_layers"] - 1)
    config["num_nextn_predict_layers"] = 0


def draft_tensors(model: GgufModel, num_layers: int) -> set[str]:
    """Names of the tensors of such layers, in a model of `num_layers` without them."""
    arch = model.text("general.architecture")
    if not model.integer(f"{arch}.nextn_predict_layers", 0):
        return set()
    last = model.integer(f"{arch}.block_count", num_layers, 0, len(model.tensors))
    prefixes = tuple(f"blk.{number}." for number in range(num_layers, last))
    return {name for name in model.tensors if name.startswith(prefixes)}


#: Whole numbers of experts beside one that all tokens share: key -> field.
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
        config[field] = model.integer(f"{arch}.{key}", low=int(field != "first_k_dense_replace"), high=MAX_SIDE)
    for key, field in _GROUP_COUNTS.items():
        config[field] = model.integer(f"{arch}.{key}", 1, 1, 1 << 16)
    count, groups = config["n_routed_experts"], config["n_group"]
    if not config["num_experts_per_tok"] <= count <= 1 << 16 or count % groups or config["topk_group"] > groups:
        raise UnsupportedModel(
            f"{model.path} uses {config['num_experts_per_tok']} of {count} experts, in {config['topk_group']} of "
            f"{groups} groups, which cannot be"
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


#: How experts are chosen, by the numbers that files use.
SOFTMAX, SIGMOID = 1, 2


def _read_sigmoid(model: GgufModel, arch: str, config: Config) -> None:
    kind = model.integer(f"{arch}.expert_gating_func", SIGMOID)
    if kind != SIGMOID:
        raise UnsupportedModel(f"{model.path}: expert_gating_func is {kind}; experts of {arch} are read with {SIGMOID}")


def _write_sigmoid(config: Any, put: Put) -> None:
    put("expert_gating_func", SIGMOID)


def _read_softmax(model: GgufModel, arch: str, config: Config) -> None:
    kind = model.integer(f"{arch}.expert_gating_func", SOFTMAX)
    if kind not in (0, SOFTMAX) or config["norm_topk_prob"]:
        raise UnsupportedModel(f"{model.path}: experts are chosen in a way that is not known for {arch}")
    config["topk_method"] = _method(config["n_group"])


def _write_softmax(config: Any, put: Put) -> None:
    if config.norm_topk_prob or config.topk_method != _method(config.n_group or 1):
        raise UnsupportedModel(f"topk_method {config.topk_method!r} of this model cannot be stored in a GGUF file")
    put("expert_gating_func", SOFTMAX)


def _method(num_groups: int) -> str:
    return "group_limited_greedy" if num_groups > 1 else "greedy"


def _read_shared_like_layers(model: GgufModel, arch: str, config: Config) -> None:
    """Hunyuan's: one that all tokens share, as wide as the others."""
    config["num_experts"] = model.integer(f"{arch}.expert_count", low=1, high=1 << 16)
    config["moe_topk"] = model.integer(f"{arch}.expert_used_count", low=1, high=config["num_experts"])
    width = model.integer(f"{arch}.expert_shared_feed_forward_length", config["intermediate_size"], 0, MAX_SIDE)
    if width != config["intermediate_size"] or model.integer(f"{arch}.expert_shared_count", 1) != 1:
        raise UnsupportedModel(f"{model.path} shares other experts than one of {config['intermediate_size']} numbers")


def _write_shared_like_layers(config: Any, put: Put) -> None:
    if not isinstance(config.moe_topk, int) or not isinstance(config.num_experts, int):
        raise UnsupportedModel("numbers of experts that differ from layer to layer cannot be written to a GGUF file")
    put("expert_count", config.num_experts)
    put("expert_used_count", config.moe_topk)
    put("expert_shared_feed_forward_length", int(config.intermediate_size))
    put("expert_shared_count", 1)


TRAITS: dict[str, tuple[Reader, Writer]] = {
    "experts like layers": (_read_like_layers, _write_like_layers),
    "draft layers": (_read_nothing, _write_nothing),
    "shared experts": (_read_shared_experts, _write_shared_experts),
    "softmax": (_read_softmax, _write_softmax),
    "sigmoid": (_read_sigmoid, _write_sigmoid),
    "shared like layers": (_read_shared_like_layers, _write_shared_like_layers),
    "clamped gates": (_read_nothing, _write_clamped_gates),
}
