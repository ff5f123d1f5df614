"""The configuration of a GGUF file as a `config.json`, and back.

Each key of the metadata is a field of the library's configuration under another name; what a family has beyond the
common ones stands in `_FURTHER`, a reader and a writer for each.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, sqrt
from typing import Any

from bridle.errors import UnsupportedModel
from bridle.gguf.families import Family, family_of, known_architectures
from bridle.gguf.shards import GgufModel
from bridle.shown import shown

Config = dict[str, Any]
MAX_LAYERS = 1 << 12
_SIDE = 1 << 24

#: Whole numbers that every family has: key -> field.
_COUNTS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_NORM_KEYS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")


def find_family(model: GgufModel) -> Family:
    """Raises `UnsupportedModel` for an architecture that is not known."""
    arch = model.text("general.architecture")
    family = family_of(arch, model.integer(f"{arch}.expert_count", 0) > 0)
    if family is None:
        raise UnsupportedModel(
            f"{model.path} is of the architecture {shown(arch)}; known are {', '.join(known_architectures())}"
        )
    return family


def read_config(model: GgufModel, family: Family) -> Config:
    """The fields of `config.json`. Raises `UnsupportedModel` for a field that is missing, or has no counterpart."""
    arch = family.arch
    config: Config = {"model_type": family.model_type}
    for key, field in _COUNTS.items():
        config[field] = model.integer(f"{arch}.{key}", low=1, high=_SIDE)
    most = min(MAX_LAYERS, len(model.tensors))
    if config["num_hidden_layers"] > most:
        raise UnsupportedModel(f"{model.path} claims {config['num_hidden_layers']} layers; it can have {most} at most")
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = model.integer(f"{arch}.attention.head_count_kv", heads, 1, heads)
    config["head_dim"] = model.integer(f"{arch}.attention.key_length", config["hidden_size"] // heads, 1, _SIDE)
    if model.integer(f"{arch}.attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise UnsupportedModel(f"{model.path} has values of another length than keys, which is not read")
    config[family.layer_norm or "rms_norm_eps"] = model.real(f"{arch}.{_NORM_KEYS[bool(family.layer_norm)]}")
    config["vocab_size"] = _num_tokens(model)
    config["tie_word_embeddings"] = "output.weight" not in model.tensors
    config["rope_parameters"] = _read_rotation(model, arch, config)
    for name in family.reads:
        _FURTHER[name][0](model, arch, config)
    return config | _special_ids(model)


def _num_tokens(model: GgufModel) -> int:
    entry = model.tensors.get("token_embd.weight")
    if entry is None or len(entry.shape) != 2:
        raise UnsupportedModel(f"{model.path} has no token embedding, and so no model")
    return entry.shape[0]


def _special_ids(model: GgufModel) -> Config:
    ids: Config = {}
    for role, field in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        value = model.metadata.get(f"tokenizer.ggml.{role}_token_id")
        ids[field] = value if isinstance(value, int) and 0 <= value < _num_tokens(model) else None
    return ids


def _has(model: GgufModel, name: str) -> bool:
    return f"blk.0.{name}" in model.tensors


# -- rotary positions -------------------------------------------------------------------------------------------


def _read_rotation(model: GgufModel, arch: str, config: Config) -> Config:
    width = model.integer(f"{arch}.rope.dimension_count", config["head_dim"], 1, _SIDE)
    rope: Config = {"rope_type": "default", "rope_theta": model.real(f"{arch}.rope.freq_base", 10_000.0)}
    if width != config["head_dim"]:
        rope["partial_rotary_factor"] = width / config["head_dim"]
    kind = model.text(f"{arch}.rope.scaling.type") or "none"
    factor = model.real(f"{arch}.rope.scaling.factor", model.real(f"{arch}.rope.scale_linear", 1.0))
    if kind == "none" and f"{arch}.rope.scale_linear" in model.metadata:
        kind = "linear"
    if kind == "linear" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor} | _read_yarn(model, arch, config)
    elif kind not in ("none", "linear", "longrope"):
        raise UnsupportedModel(
            f"{model.path}: rotary positions are scaled in the way {shown(kind)}, which is not known"
        )
    return rope


def _read_yarn(model: GgufModel, arch: str, config: Config) -> Config:
    trained = f"{arch}.rope.scaling.original_context_length"
    found: Config = {
        "original_max_position_embeddings": model.integer(trained, config["max_position_embeddings"], 1, _SIDE)
    }
    names = {"attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    for key, field in names.items():
        if f"{arch}.rope.scaling.{key}" in model.metadata:
            found[field] = model.real(f"{arch}.rope.scaling.{key}")
    if f"{arch}.rope.scaling.yarn_log_multiplier" in model.metadata:
        raise UnsupportedModel(f"{model.path}: yarn_log_multiplier is for families that are not read")
    return found


def read_line(model: GgufModel, name: str) -> list[float]:
    """A tensor of one row as numbers."""
    entry = model.tensors[name]
    if len(entry.shape) != 1 or entry.num_values > _SIDE:
        raise UnsupportedModel(f"{model.path}: tensor {name} has shape {entry.shape}; it must be one row")
    import torch

    from bridle.gguf.blocks import decode_blocks

    return [float(value) for value in decode_blocks(entry.kind.name, torch.from_numpy(model.read(name)))[0]]


def _write_rotation(config: Any, arch: str, put: Put) -> None:
    rope = dict(config.rope_parameters)
    rope = rope.get("full_attention", rope)
    put("rope.freq_base", float(rope["rope_theta"]))
    width = round(_head_dim(config) * float(rope.get("partial_rotary_factor", 1.0)))
    put("rope.dimension_count", width)
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        put("rope.scaling.type", kind)
        put("rope.scaling.factor", float(rope["factor"]))
    if kind == "yarn":
        put("rope.scaling.original_context_length", int(rope["original_max_position_embeddings"]))
        for key, field in (
            ("attn_factor", "attention_factor"),
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
        ):
            if rope.get(field) is not None:
                put(f"rope.scaling.{key}", float(rope[field]))
    elif kind not in ("default", "linear", "llama3", "longrope"):
        raise UnsupportedModel(f"rotary scaling {kind!r} cannot be written to a GGUF file")


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


# -- what a family has beyond the common fields ------------------------------------------------------------------

Put = Callable[[str, Any], None]
Reader = Callable[[GgufModel, str, Config], None]
Writer = Callable[[Any, Put], None]


def _nothing(config: Any, put: Put) -> None:
    return None


def _read_biases(model: GgufModel, arch: str, config: Config) -> None:
    config |= {"attention_bias": _has(model, "attn_q.bias"), "mlp_bias": _has(model, "ffn_up.bias")}


def _read_query_bias(model: GgufModel, arch: str, config: Config) -> None:
    config |= {"use_qkv_bias": _has(model, "attn_q.bias"), "use_parallel_residual": not _has(model, "ffn_norm.weight")}
    if _has(model, "attn_q_norm.weight"):
        raise UnsupportedModel(f"{model.path}: norms of single heads are not read for {arch}")


def _read_output_bias(model: GgufModel, arch: str, config: Config) -> None:
    config |= {"attention_bias": _has(model, "attn_q.bias"), "attention_out_bias": _has(model, "attn_output.bias")}


def _read_experts(model: GgufModel, arch: str, config: Config) -> None:
    config["num_local_experts"] = model.integer(f"{arch}.expert_count", low=1, high=1 << 16)
    config["num_experts_per_tok"] = model.integer(f"{arch}.expert_used_count", low=1, high=1 << 16)
    if config["num_experts_per_tok"] > config["num_local_experts"]:
        raise UnsupportedModel(f"{model.path} uses more experts than it has")


def _write_experts(config: Any, put: Put) -> None:
    put("expert_count", config.num_local_experts)
    put("expert_used_count", config.num_experts_per_tok)


def _read_expert_sizes(model: GgufModel, arch: str, config: Config) -> None:
    _read_experts(model, arch, config)
    config["num_experts"] = config.pop("num_local_experts")
    config["moe_intermediate_size"] = model.integer(f"{arch}.expert_feed_forward_length", low=1, high=_SIDE)
    config |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False}


def _write_expert_sizes(config: Any, put: Put) -> None:
    put("expert_count", config.num_experts)
    put("expert_used_count", config.num_experts_per_tok)
    put("expert_feed_forward_length", config.moe_intermediate_size)
    if config.decoder_sparse_step != 1 or config.mlp_only_layers:
        raise UnsupportedModel("layers with and without experts in one model cannot be written to a GGUF file")
    if config.norm_topk_prob != (config.model_type == "qwen3_moe"):
        raise UnsupportedModel(f"norm_topk_prob {config.norm_topk_prob} of this family cannot be said in a GGUF file")


def _read_even_experts(model: GgufModel, arch: str, config: Config) -> None:
    config["norm_topk_prob"] = True


def _read_shared_expert(model: GgufModel, arch: str, config: Config) -> None:
    key = f"{arch}.expert_shared_feed_forward_length"
    config["shared_expert_intermediate_size"] = model.integer(key, low=1, high=_SIDE)


def _read_some_unrotated(model: GgufModel, arch: str, config: Config) -> None:
    config["no_rope_layer_interval"] = 4


def _write_some_unrotated(config: Any, put: Put) -> None:
    if config.no_rope_layers != [int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers)]:
        raise UnsupportedModel("a GGUF file of smollm3 leaves every fourth layer unrotated; this model does not")


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


def _read_no_window(model: GgufModel, arch: str, config: Config) -> None:
    config["sliding_window"] = None


def _write_no_window(config: Any, put: Put) -> None:
    if config.sliding_window is not None and config.sliding_window < config.max_position_embeddings:
        raise UnsupportedModel("the sliding window of this family cannot be said in a GGUF file")


def _read_window(model: GgufModel, arch: str, config: Config) -> None:
    config["sliding_window"] = model.integer(f"{arch}.attention.sliding_window", 0, 0, _SIDE) or None


def _write_window(config: Any, put: Put) -> None:
    put("attention.sliding_window", int(config.sliding_window or 0))


def _read_caps(model: GgufModel, arch: str, config: Config) -> None:
    config["attn_logit_softcapping"] = model.real(f"{arch}.attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = model.real(f"{arch}.final_logit_softcapping", 30.0)


def _write_caps(config: Any, put: Put) -> None:
    put("attn_logit_softcapping", float(config.attn_logit_softcapping))
    put("final_logit_softcapping", float(config.final_logit_softcapping))


def _read_final_cap(model: GgufModel, arch: str, config: Config) -> None:
    cap = model.real(f"{arch}.final_logit_softcapping", 0.0)
    config["final_logit_softcapping"] = cap or None


def _write_final_cap(config: Any, put: Put) -> None:
    if config.final_logit_softcapping:
        put("final_logit_softcapping", float(config.final_logit_softcapping))


def _layer_types(count: int, period: int) -> list[str]:
    """All layers slide but for the last of each `period`."""
    return ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(count)]


def _narrow_scale(config: Config, layers_of_27b: int) -> int:
    """What queries are divided by the root of: the head's size, but for the largest model of each generation."""
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _check_sliding(config: Any, period: int, layers_of_27b: int) -> None:
    if list(config.layer_types) != _layer_types(config.num_hidden_layers, period):
        raise UnsupportedModel(f"a GGUF file of this family slides in all layers but one of {period}; this one differs")
    fields = {name: getattr(config, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")}
    if config.query_pre_attn_scalar != _narrow_scale(fields | {"head_dim": _head_dim(config)}, layers_of_27b):
        raise UnsupportedModel(f"query_pre_attn_scalar {config.query_pre_attn_scalar} cannot be said in a GGUF file")


def _read_every_other(model: GgufModel, arch: str, config: Config) -> None:
    _read_window(model, arch, config)
    config["layer_types"] = _layer_types(config["num_hidden_layers"], 2)
    config["query_pre_attn_scalar"] = _narrow_scale(config, 46)


def _write_every_other(config: Any, put: Put) -> None:
    _check_sliding(config, 2, 46)
    _write_window(config, put)


def _read_one_in_six(model: GgufModel, arch: str, config: Config) -> None:
    _read_window(model, arch, config)
    config["layer_types"] = _layer_types(config["num_hidden_layers"], 6)
    config["query_pre_attn_scalar"] = _narrow_scale(config, 62)
    local = model.real(f"{arch}.rope.freq_base_swa", 10_000.0)
    if f"{arch}.rope.freq_base" not in model.metadata:
        config["rope_parameters"]["rope_theta"] = 1_000_000.0
    config["rope_parameters"] = {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _write_one_in_six(config: Any, put: Put) -> None:
    _check_sliding(config, 6, 62)
    _write_window(config, put)
    put("rope.freq_base_swa", float(config.rope_parameters["sliding_attention"]["rope_theta"]))


def _read_logit_scale(model: GgufModel, arch: str, config: Config) -> None:
    config |= {"logit_scale": model.real(f"{arch}.logit_scale"), "use_qk_norm": False}
    if _has(model, "attn_q_norm.weight"):
        raise UnsupportedModel(f"{model.path}: norms of queries and keys are not read for {arch}")


def _write_logit_scale(config: Any, put: Put) -> None:
    if config.use_qk_norm:
        raise UnsupportedModel("norms of queries and keys of this family cannot be written to a GGUF file")
    put("logit_scale", float(config.logit_scale))
    put("rope.scaling.type", "none")


def _read_two_scalings(model: GgufModel, arch: str, config: Config) -> None:
    """Phi-3 with a long context: a factor for each frequency, one list for short texts and one for long ones."""
    trained = model.integer(f"{arch}.rope.scaling.original_context_length", config["max_position_embeddings"], 1, _SIDE)
    config["original_max_position_embeddings"] = trained
    if "rope_factors_long.weight" not in model.tensors:
        return
    config["rope_parameters"] |= {
        "rope_type": "longrope",
        "long_factor": read_line(model, "rope_factors_long.weight"),
        "short_factor": read_line(model, "rope_factors_short.weight"),
        "original_max_position_embeddings": trained,
        "attention_factor": model.real(f"{arch}.rope.scaling.attn_factor", 1.0),
    }


def _write_two_scalings(config: Any, put: Put) -> None:
    rope, trained = config.rope_parameters, int(config.original_max_position_embeddings)
    put("rope.scaling.original_context_length", trained)
    if rope.get("rope_type") != "longrope":
        return
    stretch = max(config.max_position_embeddings / trained, 1.0)
    put("rope.scaling.attn_factor", float(rope.get("attention_factor") or sqrt(1 + log(stretch) / log(trained))))


def _write_residual(config: Any, put: Put) -> None:
    if config.qk_layernorm:
        raise UnsupportedModel("norms of single heads of this family cannot be written to a GGUF file")
    put("use_parallel_residual", bool(config.use_parallel_residual))


def _write_shared_expert(config: Any, put: Put) -> None:
    put("expert_shared_feed_forward_length", config.shared_expert_intermediate_size)


_FURTHER: dict[str, tuple[Reader, Writer]] = {
    "biases": (_read_biases, _nothing),
    "query bias": (_read_query_bias, _write_residual),
    "output bias": (_read_output_bias, _nothing),
    "experts": (_read_experts, _write_experts),
    "expert sizes": (_read_expert_sizes, _write_expert_sizes),
    "even experts": (_read_even_experts, _nothing),
    "shared expert": (_read_shared_expert, _write_shared_expert),
    "some unrotated": (_read_some_unrotated, _write_some_unrotated),
    "multipliers": (_read_multipliers, _write_multipliers),
    "no window": (_read_no_window, _write_no_window),
    "window": (_read_window, _write_window),
    "caps": (_read_caps, _write_caps),
    "final cap": (_read_final_cap, _write_final_cap),
    "every other": (_read_every_other, _write_every_other),
    "one in six": (_read_one_in_six, _write_one_in_six),
    "logit scale": (_read_logit_scale, _write_logit_scale),
    "two scalings": (_read_two_scalings, _write_two_scalings),
}


def write_config(config: Any, family: Family, put: Put) -> None:
    """Write the library's configuration as metadata; `put` gets keys without the architecture. Raises
    `UnsupportedModel` for settings that a GGUF file cannot express."""
    for key, field in _COUNTS.items():
        put(key, int(getattr(config, field)))
    put("attention.head_count_kv", int(config.num_key_value_heads or config.num_attention_heads))
    put("attention.key_length", _head_dim(config))
    put("attention.value_length", _head_dim(config))
    eps = float(getattr(config, family.layer_norm or "rms_norm_eps"))
    put(_NORM_KEYS[bool(family.layer_norm)], eps)
    put("vocab_size", int(config.vocab_size))
    _write_rotation(config, family.arch, put)
    for name in family.reads:
        _FURTHER[name][1](config, put)
