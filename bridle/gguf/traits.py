"""Properties of model families beyond the common fields, each with a reader and a writer. `GgufFamily.reads` names the
properties of a family, and `TRAITS` has all properties by name."""

from __future__ import annotations

from math import inf
from statistics import NormalDist
from typing import Any

import numpy as np

from bridle.errors import UnsupportedModel
from bridle.gguf import joined_heads, moe, recurrent, sliding_window
from bridle.gguf.fields import (
    MAX_SIDE,
    Config,
    Put,
    Reader,
    Writer,
    by_layer,
    has,
    head_dim,
    read_nothing,
    write_nothing,
)
from bridle.gguf.rope import (
    read_temperature,
    read_two_scalings,
    read_whole_ramp,
    write_temperature,
    write_two_scalings,
    write_whole_ramp,
)
from bridle.gguf.shards import GgufModel
from bridle.gguf.varied_layers import read_two_rotations, write_two_rotations


def _read_biases(model: GgufModel, arch: str, config: Config) -> None:
    config |= {"attention_bias": has(model, "attn_q.bias"), "mlp_bias": has(model, "ffn_up.bias")}


def _read_query_bias(model: GgufModel, arch: str, config: Config) -> None:
    config |= {"use_qkv_bias": has(model, "attn_q.bias"), "use_parallel_residual": not has(model, "ffn_norm.weight")}
    if has(model, "attn_q_norm.weight"):
        raise UnsupportedModel(f"{model.path}: {arch} with per-head query and key norms is not supported")


def _read_output_bias(model: GgufModel, arch: str, config: Config) -> None:
    config |= {"attention_bias": has(model, "attn_q.bias"), "attention_out_bias": has(model, "attn_output.bias")}


def _read_experts(model: GgufModel, arch: str, config: Config) -> None:
    config["num_local_experts"] = model.integer(f"{arch}.expert_count", low=1, high=1 << 16)
    config["num_experts_per_tok"] = model.integer(f"{arch}.expert_used_count", low=1, high=1 << 16)
    if config["num_experts_per_tok"] > config["num_local_experts"]:
        raise UnsupportedModel(f"{model.path}: expert_used_count is larger than expert_count")


def _write_experts(config: Any, put: Put) -> None:
    put("expert_count", config.num_local_experts)
    put("expert_used_count", config.num_experts_per_tok)


def _read_expert_sizes(model: GgufModel, arch: str, config: Config) -> None:
    _read_experts(model, arch, config)
    config["num_experts"] = config.pop("num_local_experts")
    config["moe_intermediate_size"] = model.integer(f"{arch}.expert_feed_forward_length", low=1, high=MAX_SIDE)
    config |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False}


def _write_expert_sizes(config: Any, put: Put) -> None:
    put("expert_count", config.num_experts)
    put("expert_used_count", config.num_experts_per_tok)
    put("expert_feed_forward_length", config.moe_intermediate_size)
    if config.decoder_sparse_step != 1 or config.mlp_only_layers:
        raise UnsupportedModel("a model that mixes layers with and without experts cannot be written to a GGUF file")
    if config.norm_topk_prob != config.model_type.startswith("qwen3_"):
        raise UnsupportedModel(f"norm_topk_prob={config.norm_topk_prob} of this family cannot be stored in a GGUF file")


def _read_even_experts(model: GgufModel, arch: str, config: Config) -> None:
    config["norm_topk_prob"] = True


def _read_plain_experts(model: GgufModel, arch: str, config: Config) -> None:
    _read_experts(model, arch, config)
    config["num_experts"] = config.pop("num_local_experts")
    config["norm_topk_prob"] = False


def _write_plain_experts(config: Any, put: Put) -> None:
    put("expert_count", config.num_experts)
    put("expert_used_count", config.num_experts_per_tok)
    if config.norm_topk_prob:
        raise UnsupportedModel("norm_topk_prob=True of this family cannot be stored in a GGUF file")


def _read_clip(model: GgufModel, arch: str, config: Config) -> None:
    config["clip_qkv"] = model.real(f"{arch}.attention.clamp_kqv", 0.0) or None


def _write_clip(config: Any, put: Put) -> None:
    if config.clip_qkv:
        put("attention.clamp_kqv", float(config.clip_qkv))


def _read_attention_bias(model: GgufModel, arch: str, config: Config) -> None:
    config["attention_bias"] = has(model, "attn_q.bias")


def _read_head_norms_or_none(model: GgufModel, arch: str, config: Config) -> None:
    config["use_qk_norm"] = has(model, "attn_q_norm.weight")


def _read_half_rotated(model: GgufModel, arch: str, config: Config) -> None:
    """Read the share of a head that rotates. The field is always set, because its default in transformers is one
    half."""
    width = model.integer(f"{arch}.rope.dimension_count", config["head_dim"], 1, config["head_dim"])
    config["rope_parameters"]["partial_rotary_factor"] = width / config["head_dim"]


def _read_one_bias(model: GgufModel, arch: str, config: Config) -> None:
    config["use_bias"] = has(model, "attn_q.bias")


def _write_three_positions(config: Any, put: Put) -> None:
    """Write how many value pairs of a head rotate with each of a position's components (time, height, width). For text,
    any division of the value pairs gives the same result."""
    share = float(config.rope_parameters.get("partial_rotary_factor", 1.0))
    half = round(head_dim(config) * share) // 2
    put("rope.dimension_sections", [half - 2 * (half // 3), half // 3, half // 3, 0])


def _read_no_head_norms(model: GgufModel, arch: str, config: Config) -> None:
    config["qk_layernorm"] = False


def _write_no_head_norms(config: Any, put: Put) -> None:
    if config.qk_layernorm:
        raise UnsupportedModel("per-head query and key norms of this family cannot be written to a GGUF file")


def _write_one_rotation(config: Any, put: Put) -> None:
    if config.rope_parameters.get("rope_type", "default") != "default":
        raise UnsupportedModel("RoPE scaling of only some layers cannot be written to a GGUF file of this family")


def _read_one_rotation(model: GgufModel, arch: str, config: Config) -> None:
    if config["rope_parameters"]["rope_type"] != "default":
        raise UnsupportedModel(f"{model.path}: RoPE scaling of only some layers is not supported")


def _read_shared_expert(model: GgufModel, arch: str, config: Config) -> None:
    key = f"{arch}.expert_shared_feed_forward_length"
    config["shared_expert_intermediate_size"] = model.integer(key, low=1, high=MAX_SIDE)


def _read_some_unrotated(model: GgufModel, arch: str, config: Config) -> None:
    config["no_rope_layer_interval"] = 4


def _write_some_unrotated(config: Any, put: Put) -> None:
    if config.no_rope_layers != [int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers)]:
        raise UnsupportedModel("a GGUF file of smollm3 needs exactly every fourth layer without RoPE")


_MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}


def _read_multipliers(model: GgufModel, arch: str, config: Config) -> None:
    config |= {field: model.real(f"{arch}.{key}") for key, field in _MULTIPLIERS.items()}


def _write_multipliers(config: Any, put: Put) -> None:
    for key, field in _MULTIPLIERS.items():
        put(key, float(getattr(config, field)))


def _read_fewer_multipliers(model: GgufModel, arch: str, config: Config) -> None:
    """Read MiniCPM's multipliers. MiniCPM divides attention scores by the square root of the head size, as usual."""
    config |= {field: model.real(f"{arch}.{key}") for key, field in _MULTIPLIERS.items() if key != "attention.scale"}
    config["attention_multiplier"] = config["head_dim"] ** -0.5


def _read_logit_scale(model: GgufModel, arch: str, config: Config) -> None:
    config |= {"logit_scale": model.real(f"{arch}.logit_scale"), "use_qk_norm": False}
    if has(model, "attn_q_norm.weight"):
        raise UnsupportedModel(f"{model.path}: {arch} with query and key norms is not supported")


def _write_logit_scale(config: Any, put: Put) -> None:
    if getattr(config, "use_qk_norm", False):
        raise UnsupportedModel("query and key norms of this family cannot be written to a GGUF file")
    put("logit_scale", float(config.logit_scale))
    put("rope.scaling.type", "none")


def _write_query_bias(config: Any, put: Put) -> None:
    _write_no_head_norms(config, put)
    _write_residual(config, put)


def _read_residual(model: GgufModel, arch: str, config: Config) -> None:
    config["use_parallel_residual"] = model.flag(f"{arch}.use_parallel_residual", True)


def _write_residual(config: Any, put: Put) -> None:
    put("use_parallel_residual", bool(config.use_parallel_residual))


def _write_shared_expert(config: Any, put: Put) -> None:
    put("expert_shared_feed_forward_length", config.shared_expert_intermediate_size)


def _read_routed_experts(model: GgufModel, arch: str, config: Config) -> None:
    """Read the expert sizes of Qwen 3.5, whose routing weights always sum to 1."""
    _read_expert_sizes(model, arch, config)
    for name in ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"):
        del config[name]


def _write_routed_experts(config: Any, put: Put) -> None:
    put("expert_count", config.num_experts)
    put("expert_used_count", config.num_experts_per_tok)
    put("expert_feed_forward_length", config.moe_intermediate_size)


def _read_altered_inputs(model: GgufModel, arch: str, config: Config) -> None:
    """Read Gemma 3n's layer inputs and its activation sparsity. For activation sparsity, a file stores normal quantiles
    of the share of MLP values that become 0."""
    count = config["num_hidden_layers"]
    config["intermediate_size"] = by_layer(model, f"{arch}.feed_forward_length", count)
    quantiles = model.numbers(f"{arch}.activation_sparsity_scale")[:count].tolist() or [-inf] * count
    config["activation_sparsity_pattern"] = [round(NormalDist().cdf(each), 6) for each in quantiles]
    for name, field in (("per_layer_token_embd", "vocab_size_per_layer_input"), ("blk.0.laurel_l", "laurel_rank")):
        entry = model.tensors.get(f"{name}.weight")
        if entry is None:
            raise UnsupportedModel(f"{model.path} lacks tensor '{name}.weight'")
        config[field] = entry.shape[0]


def _write_altered_inputs(config: Any, put: Put) -> None:
    put("feed_forward_length", [int(width) for width in config.intermediate_size])
    normal = NormalDist()
    shares = [float(share) for share in config.activation_sparsity_pattern]
    put("activation_sparsity_scale", [normal.inv_cdf(share) if share else -inf for share in shares])


def _read_rotated_layers(model: GgufModel, arch: str, config: Config) -> None:
    """Read which layers of a Granite model with windows have rotary positions. If the file has no list of layers, all
    layers have rotary positions."""
    count = config["num_hidden_layers"]
    rotates = model.metadata.get(f"{arch}.attention.rope_pattern", [True] * count)
    if not isinstance(rotates, (list, np.ndarray)) or len(rotates) < count:
        raise UnsupportedModel(f"{model.path}: {arch}.attention.rope_pattern must be a list of {count} layers")
    base = config["rope_parameters"]["rope_theta"]
    config["layer_rope_theta"] = [base if each else 0.0 for each in rotates[:count]]


def _write_rotated_layers(config: Any, put: Put) -> None:
    bases = [float(base) for base in config.layer_rope_theta]
    if set(bases) - {0.0, float(config.rope_parameters["rope_theta"])}:
        raise UnsupportedModel("RoPE bases that differ between layers cannot be written to a GGUF file")
    put("attention.rope_pattern", [base > 0 for base in bases])


def _read_bias_of_head(model: GgufModel, arch: str, config: Config) -> None:
    config["lm_head_bias"] = "output.bias" in model.tensors


def _read_unscaled(model: GgufModel, arch: str, config: Config) -> None:
    if "rope_factors_long.weight" in model.tensors:
        raise UnsupportedModel(f"{model.path}: {arch} with a RoPE factor for each frequency is not supported")


def _write_index_types(config: Any, put: Put) -> None:
    put("attention.indexer.types", [kind == "full" for kind in config.indexer_types])


TRAITS: dict[str, tuple[Reader, Writer]] = {
    "index types": (read_nothing, _write_index_types),
    "layers with a rotation": (_read_rotated_layers, _write_rotated_layers),
    "unscaled": (_read_unscaled, write_nothing),
    "bias of the head": (_read_bias_of_head, write_nothing),
    "two rotations": (read_two_rotations, write_two_rotations),
    "altered inputs": (_read_altered_inputs, _write_altered_inputs),
    "routed experts": (_read_routed_experts, _write_routed_experts),
    "biases": (_read_biases, write_nothing),
    "query bias": (_read_query_bias, _write_query_bias),
    "residual": (_read_residual, _write_residual),
    "output bias": (_read_output_bias, write_nothing),
    "experts": (_read_experts, _write_experts),
    "expert sizes": (_read_expert_sizes, _write_expert_sizes),
    "plain experts": (_read_plain_experts, _write_plain_experts),
    "clip": (_read_clip, _write_clip),
    "one bias": (_read_one_bias, write_nothing),
    "three positions": (read_nothing, _write_three_positions),
    "head norms or none": (_read_head_norms_or_none, write_nothing),
    "half rotated": (_read_half_rotated, write_nothing),
    "attention bias": (_read_attention_bias, write_nothing),
    "no head norms": (_read_no_head_norms, _write_no_head_norms),
    "one rotation": (_read_one_rotation, _write_one_rotation),
    "one in four": (sliding_window.read_one_in_four, sliding_window.write_one_in_four),
    "even experts": (_read_even_experts, write_nothing),
    "shared expert": (_read_shared_expert, _write_shared_expert),
    "some unrotated": (_read_some_unrotated, _write_some_unrotated),
    "multipliers": (_read_multipliers, _write_multipliers),
    "no window": (sliding_window.read_no_window, sliding_window.write_no_window),
    "window": (sliding_window.read_window, sliding_window.write_window),
    "caps": (sliding_window.read_caps, sliding_window.write_caps),
    "final cap": (sliding_window.read_final_cap, sliding_window.write_final_cap),
    "alternating": (sliding_window.read_alternating, sliding_window.write_alternating),
    "window in some": (sliding_window.read_window_in_some, sliding_window.write_window_in_some),
    "every other": (sliding_window.read_every_other, sliding_window.write_every_other),
    "one in six": (sliding_window.read_one_in_six, sliding_window.write_one_in_six),
    "fewer multipliers": (_read_fewer_multipliers, _write_multipliers),
    "read scalings": (read_two_scalings, write_nothing),
    "logit scale": (_read_logit_scale, _write_logit_scale),
    "two scalings": (read_two_scalings, write_two_scalings),
    "temperature": (read_temperature, write_temperature),
    "whole ramp": (read_whole_ramp, write_whole_ramp),
    **joined_heads.TRAITS,
    **moe.TRAITS,
    **recurrent.TRAITS,
}
