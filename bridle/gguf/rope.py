"""Converts the settings of rotary positions (RoPE) between GGUF metadata and the transformers configuration."""

from __future__ import annotations

from math import log, sqrt
from typing import Any

from bridle.errors import UnsupportedModel
from bridle.gguf.fields import MAX_SIDE, Config, Put, head_dim
from bridle.gguf.shards import GgufModel
from bridle.safe_repr import short_repr


def read_rotation(model: GgufModel, arch: str, config: Config) -> Config:
    width = model.integer(f"{arch}.rope.dimension_count", config["head_dim"], 1, MAX_SIDE)
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
        raise UnsupportedModel(f"{model.path} has the unknown RoPE scaling {short_repr(kind)}")
    return rope


#: The factor by which YaRN multiplies the logarithm of its scaling factor; DeepSeek's files multiply it further.
_LOG_SCALE = 0.1
#: The architecture whose files do not multiply it.
_WHOLE_MULTIPLIER = "mistral3"


def _log_scale(arch: str) -> float:
    return 1.0 if arch == _WHOLE_MULTIPLIER else _LOG_SCALE


def read_temperature(model: GgufModel, arch: str, config: Config) -> None:
    """Read Ministral 3's attention temperature: a factor of queries that grows in steps of the training context
    length."""
    if config["rope_parameters"]["rope_type"] != "yarn":
        raise UnsupportedModel(f"{model.path}: {arch} is supported only with YaRN RoPE scaling")
    config["rope_parameters"]["llama_4_scaling_beta"] = model.real(f"{arch}.attention.temperature_scale", 0.0)


def write_temperature(config: Any, put: Put) -> None:
    if config.rope_parameters.get("rope_type") != "yarn":
        raise UnsupportedModel("a GGUF file of this family needs YaRN RoPE scaling")
    put("attention.temperature_scale", float(config.rope_parameters.get("llama_4_scaling_beta") or 0.0))


def _read_yarn(model: GgufModel, arch: str, config: Config) -> Config:
    trained = f"{arch}.rope.scaling.original_context_length"
    found: Config = {
        "original_max_position_embeddings": model.integer(trained, config["max_position_embeddings"], 1, MAX_SIDE)
    }
    names = {"attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    for key, field in names.items():
        if f"{arch}.rope.scaling.{key}" in model.metadata:
            found[field] = model.real(f"{arch}.rope.scaling.{key}")
    if f"{arch}.rope.scaling.yarn_log_multiplier" in model.metadata:
        if "kv_lora_rank" not in config and arch != _WHOLE_MULTIPLIER:
            raise UnsupportedModel(f"{model.path}: yarn_log_multiplier is not supported for this architecture")
        scale = model.real(f"{arch}.rope.scaling.yarn_log_multiplier") / _log_scale(arch)
        found |= {"mscale": scale, "mscale_all_dim": scale}
    return found


def read_line(model: GgufModel, name: str) -> list[float]:
    """Return the values of a one-dimensional tensor as floats."""
    entry = model.tensors[name]
    if len(entry.shape) != 1 or entry.num_values > MAX_SIDE:
        raise UnsupportedModel(f"{model.path}: tensor {name} has shape {entry.shape}; it must be one row")
    import torch

    from bridle.gguf.dequantize import decode_blocks

    return [float(value) for value in decode_blocks(entry.kind.name, torch.from_numpy(model.read(name)))[0]]


def write_rotation(config: Any, arch: str, put: Put, width: int = 0) -> None:
    """Write the rotary settings of layers without a window. `width` is the number of values of a head that rotate
    (default: from the configuration)."""
    rope = dict(config.rope_parameters)
    rope = rope.get("full_attention", rope)
    kind = rope.get("rope_type", "default")
    base = float(rope["rope_theta"])
    if kind == "dynamic" and rope.get("alpha"):  # Hunyuan's fixed scaling is a larger base
        kind, base = "default", base * float(rope["alpha"]) ** (head_dim(config) / (head_dim(config) - 2))
    put("rope.freq_base", base)
    put("rope.dimension_count", width or round(head_dim(config) * float(rope.get("partial_rotary_factor", 1.0))))
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
        if rope.get("mscale_all_dim"):
            if rope.get("mscale") != rope["mscale_all_dim"]:
                raise UnsupportedModel("a GGUF file needs mscale and mscale_all_dim to be equal")
            put("rope.scaling.yarn_log_multiplier", _log_scale(arch) * float(rope["mscale_all_dim"]))
    elif kind not in ("default", "linear", "llama3", "longrope"):
        raise UnsupportedModel(f"RoPE scaling {kind!r} cannot be written to a GGUF file")


def read_whole_ramp(model: GgufModel, arch: str, config: Config) -> None:
    """Read gpt-oss's YaRN settings. In gpt-oss, the bounds of YaRN's ramp from scaled to unscaled frequencies are not
    rounded to whole frequency numbers."""
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False


def write_whole_ramp(config: Any, put: Put) -> None:
    if config.rope_parameters.get("rope_type") == "yarn" and config.rope_parameters.get("truncate", True):
        raise UnsupportedModel("a GGUF file of this family needs RoPE scaling with truncate=False")


def read_two_scalings(model: GgufModel, arch: str, config: Config) -> None:
    """Read Phi-3's scaling for long contexts: one list of factors per frequency for short texts, and one for long
    texts."""
    trained = model.integer(
        f"{arch}.rope.scaling.original_context_length", config["max_position_embeddings"], 1, MAX_SIDE
    )
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


def write_two_scalings(config: Any, put: Put) -> None:
    rope = config.rope_parameters
    trained = getattr(config, "original_max_position_embeddings", None) or rope.get("original_max_position_embeddings")
    trained = int(trained or config.max_position_embeddings)
    put("rope.scaling.original_context_length", trained)
    if rope.get("rope_type") != "longrope":
        return
    stretch = max(config.max_position_embeddings / trained, 1.0)
    put("rope.scaling.attn_factor", float(rope.get("attention_factor") or sqrt(1 + log(stretch) / log(trained))))
