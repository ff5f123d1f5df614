"""Model families whose layers with and without a sliding window differ in heads or rotary positions: Laguna and
MiMo-V2."""

from __future__ import annotations

from typing import Any

from bridle.errors import UnsupportedModel
from bridle.gguf.fields import MAX_SIDE, Config, Put, by_layer, head_dim
from bridle.gguf.rope import read_rotation, write_rotation
from bridle.gguf.shards import GgufModel
from bridle.gguf.sliding_window import read_window, read_window_in_some, write_window_in_some

_FULL, _SLIDING = "full_attention", "sliding_attention"


def share(width: int, whole: int) -> float:
    """Return the rotated share of a head of `whole` values, such that share times `whole`, rounded down, is `width`."""
    part = width / whole
    return part if int(part * whole) == width else (width + 0.5) / whole


def _rotations(model: GgufModel, arch: str, config: Config, width: int) -> Config:
    """Return the rotary settings of both kinds of layers. Layers with a window have unscaled positions."""
    size = config["head_dim"]
    full = read_rotation(model, arch, config)
    full["partial_rotary_factor"] = share(model.integer(f"{arch}.rope.dimension_count", size, 1, size), size)
    base = model.real(f"{arch}.rope.freq_base_swa", full["rope_theta"])
    sliding = {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": share(width, size)}
    if width == size == model.integer(f"{arch}.rope.dimension_count", size, 1, size):
        del full["partial_rotary_factor"], sliding["partial_rotary_factor"]
    return {_FULL: full, _SLIDING: sliding}


def _write_sliding_rotation(config: Any, put: Put) -> None:
    sliding = config.rope_parameters[_SLIDING]
    if sliding.get("rope_type", "default") != "default":
        raise UnsupportedModel("RoPE scaling of sliding-window layers cannot be written to a GGUF file")
    put("rope.freq_base_swa", float(sliding["rope_theta"]))


def _width(config: Any, kind: str) -> int:
    return int(head_dim(config) * float(config.rope_parameters[kind].get("partial_rotary_factor", 1.0)))


def read_two_rotations(model: GgufModel, arch: str, config: Config) -> None:
    size = config["head_dim"]
    config["rope_parameters"] = _rotations(model, arch, config, model.integer(f"{arch}.rope.dimension_count", size))


def write_two_rotations(config: Any, put: Put) -> None:
    write_rotation(config, config.model_type, put, _width(config, _FULL))
    _write_sliding_rotation(config, put)


# -- Laguna -------------------------------------------------------------------------------------------------------


def read_varied(model: GgufModel, arch: str, config: Config) -> None:
    """Read the properties of Laguna's layers: the number of heads in each layer, the type of gate, and full attention
    in one layer of four."""
    count = config["num_hidden_layers"]
    heads = by_layer(model, f"{arch}.attention.head_count", count)
    size = model.integer(f"{arch}.attention.key_length", low=1, high=MAX_SIDE)
    kv_heads = model.integer(f"{arch}.attention.head_count_kv", low=1, high=MAX_SIDE)
    if not all(heads) or any(each % kv_heads for each in heads):
        raise UnsupportedModel(f"{model.path}: {arch}.attention.head_count must hold multiples of {kv_heads}")
    gate = model.tensors.get("blk.0.attn_gate.weight")
    config |= {
        "num_attention_heads": heads[0],
        "num_attention_heads_per_layer": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "gating": True if gate is None or gate.shape[0] == heads[0] else "per-element",
    }
    _read_first_in_four(model, arch, config)
    swa = model.integer(f"{arch}.rope.dimension_count_swa", size, 1, size)
    config["rope_parameters"] = _rotations(model, arch, config, swa)


def _read_first_in_four(model: GgufModel, arch: str, config: Config) -> None:
    if f"{arch}.attention.sliding_window_pattern" in model.metadata:
        return read_window_in_some(model, arch, config)
    read_window(model, arch, config)
    slides = config["sliding_window"] is not None
    config["layer_types"] = [
        _SLIDING if slides and layer % 4 else _FULL for layer in range(config["num_hidden_layers"])
    ]
    if not slides:
        config["sliding_window"] = config["max_position_embeddings"]
    return None


def write_varied(config: Any, put: Put) -> None:
    heads = config.num_attention_heads_per_layer or [config.num_attention_heads] * config.num_hidden_layers
    put("attention.head_count", [int(each) for each in heads])
    put("attention.head_count_kv", int(config.num_key_value_heads))
    put("attention.key_length", head_dim(config))
    put("attention.value_length", head_dim(config))
    if _SLIDING in config.layer_types:
        write_window_in_some(config, put)
    write_rotation(config, "laguna", put, _width(config, _FULL))
    put("rope.dimension_count_swa", _width(config, _SLIDING))
    _write_sliding_rotation(config, put)


# -- MiMo-V2 ------------------------------------------------------------------------------------------------------


def read_paired_kinds(model: GgufModel, arch: str, config: Config) -> None:
    """Read the properties of MiMo-V2's layers. Layers with a window have twice as many key heads; values are shorter
    than keys."""
    count = config["num_hidden_layers"]
    read_window_in_some(model, arch, config)
    size = model.integer(f"{arch}.attention.key_length", low=1, high=MAX_SIDE)
    heads = by_layer(model, f"{arch}.attention.head_count_kv", count)
    full = next((heads[layer] for layer in range(count) if config["layer_types"][layer] == _FULL), 0)
    if not full or heads != [full * (1 + (kind == _SLIDING)) for kind in config["layer_types"]]:
        raise UnsupportedModel(f"{model.path}: sliding-window layers of {arch} must have twice as many key heads")
    config |= {
        "num_key_value_heads": full,
        "head_dim": size,
        "v_head_dim": model.integer(f"{arch}.attention.value_length", low=1, high=MAX_SIDE),
    }
    width = model.integer(f"{arch}.rope.dimension_count", size, 1, size)
    config["rope_parameters"] = _rotations(model, arch, config, width)


def write_paired_kinds(config: Any, put: Put) -> None:
    put(
        "attention.head_count_kv", [int(config.num_key_value_heads) * (1 + (k == _SLIDING)) for k in config.layer_types]
    )
    put("attention.key_length", head_dim(config))
    put("attention.value_length", int(config.v_head_dim))
    write_window_in_some(config, put)
    if _width(config, _FULL) != _width(config, _SLIDING):
        raise UnsupportedModel("layers that rotate different parts of heads cannot be written to a GGUF file")
    write_rotation(config, "mimo2", put, _width(config, _FULL))
    _write_sliding_rotation(config, put)
