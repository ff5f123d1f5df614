"""Reads and writes sliding windows, the layers that have them, and the soft-caps of some families with windows."""

from __future__ import annotations

from typing import Any

import numpy as np

from bridle.errors import UnsupportedModel
from bridle.gguf.fields import MAX_SIDE, Config, Put, head_dim
from bridle.gguf.shards import GgufModel


def read_no_window(model: GgufModel, arch: str, config: Config) -> None:
    config["sliding_window"] = None


def write_no_window(config: Any, put: Put) -> None:
    if config.sliding_window is not None and config.sliding_window < config.max_position_embeddings:
        raise UnsupportedModel("a model of this family with a sliding window cannot be stored in a GGUF file")


def read_window(model: GgufModel, arch: str, config: Config) -> None:
    config["sliding_window"] = model.integer(f"{arch}.attention.sliding_window", 0, 0, MAX_SIDE) or None


def write_window(config: Any, put: Put) -> None:
    put("attention.sliding_window", int(config.sliding_window or 0))


def read_caps(model: GgufModel, arch: str, config: Config) -> None:
    config["attn_logit_softcapping"] = model.real(f"{arch}.attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = model.real(f"{arch}.final_logit_softcapping", 30.0)


def write_caps(config: Any, put: Put) -> None:
    put("attn_logit_softcapping", float(config.attn_logit_softcapping))
    put("final_logit_softcapping", float(config.final_logit_softcapping))


def read_final_cap(model: GgufModel, arch: str, config: Config) -> None:
    cap = model.real(f"{arch}.final_logit_softcapping", 0.0)
    config["final_logit_softcapping"] = cap or None


def write_final_cap(config: Any, put: Put) -> None:
    if config.final_logit_softcapping:
        put("final_logit_softcapping", float(config.final_logit_softcapping))


def _layer_types(count: int, period: int) -> list[str]:
    """Return the type of each layer: a sliding window, except in every `period`-th layer."""
    return ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(count)]


def _narrow_scale(config: Config, layers_of_27b: int) -> int:
    """Return the value whose square root divides attention scores. In Gemma models other than the 27B ones, the value
    is the head size."""
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _check_period(config: Any, period: int) -> None:
    if list(config.layer_types) != _layer_types(config.num_hidden_layers, period):
        raise UnsupportedModel(f"a GGUF file of this family needs one layer of full attention in every {period}")


def _check_sliding(config: Any, period: int, layers_of_27b: int) -> None:
    _check_period(config, period)
    fields = {name: getattr(config, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")}
    if config.query_pre_attn_scalar != _narrow_scale(fields | {"head_dim": head_dim(config)}, layers_of_27b):
        raise UnsupportedModel(f"query_pre_attn_scalar {config.query_pre_attn_scalar} cannot be stored in a GGUF file")


def read_every_other(model: GgufModel, arch: str, config: Config) -> None:
    read_window(model, arch, config)
    config["layer_types"] = _layer_types(config["num_hidden_layers"], 2)
    config["query_pre_attn_scalar"] = _narrow_scale(config, 46)


def write_every_other(config: Any, put: Put) -> None:
    _check_sliding(config, 2, 46)
    write_window(config, put)


def read_alternating(model: GgufModel, arch: str, config: Config) -> None:
    read_window(model, arch, config)
    config["layer_types"] = _layer_types(config["num_hidden_layers"], 2)


def write_alternating(config: Any, put: Put) -> None:
    _check_period(config, 2)
    write_window(config, put)


def read_window_in_some(model: GgufModel, arch: str, config: Config) -> None:
    """Read the sliding window and the layers that have it. If the file does not list the layers with a window, three of
    every four layers have it."""
    read_window(model, arch, config)
    count = config["num_hidden_layers"]
    if config["sliding_window"] is None:
        config["layer_types"] = ["full_attention"] * count
        return
    slides = model.metadata.get(f"{arch}.attention.sliding_window_pattern", 4)
    if isinstance(slides, int) and not isinstance(slides, bool) and slides > 0:
        config["layer_types"] = _layer_types(count, slides)
        return
    if not isinstance(slides, (list, np.ndarray)) or len(slides) < count:
        raise UnsupportedModel(f"{model.path}: sliding_window_pattern must be a number or a list of {count} layers")
    config["layer_types"] = ["sliding_attention" if each else "full_attention" for each in slides[:count]]


def write_window_in_some(config: Any, put: Put) -> None:
    if config.sliding_window is not None:
        write_window(config, put)
        put("attention.sliding_window_pattern", [kind == "sliding_attention" for kind in config.layer_types])


def read_one_in_six(model: GgufModel, arch: str, config: Config) -> None:
    read_window(model, arch, config)
    config["layer_types"] = _layer_types(config["num_hidden_layers"], 6)
    config["query_pre_attn_scalar"] = _narrow_scale(config, 62)
    local = model.real(f"{arch}.rope.freq_base_swa", 10_000.0)
    if f"{arch}.rope.freq_base" not in model.metadata:
        config["rope_parameters"]["rope_theta"] = 1_000_000.0
    config["rope_parameters"] = {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def write_one_in_six(config: Any, put: Put) -> None:
    _check_sliding(config, 6, 62)
    write_window(config, put)
    put("rope.freq_base_swa", float(config.rope_parameters["sliding_attention"]["rope_theta"]))


def read_one_in_four(model: GgufModel, arch: str, config: Config) -> None:
    read_window(model, arch, config)
    config["layer_types"] = _layer_types(config["num_hidden_layers"], 4)


def write_one_in_four(config: Any, put: Put) -> None:
    _check_period(config, 4)
    write_window(config, put)
