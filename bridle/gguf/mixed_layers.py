"""Reads the configuration of Gemma 4, whose layers with and without a sliding window differ. The two kinds of layers
have different head sizes, rotary angles and MLP widths. The last layers of Gemma 4 use keys and values of earlier
layers."""

from __future__ import annotations

from typing import Any

from bridle.errors import UnsupportedModel
from bridle.gguf.fields import MAX_SIDE, Config, Put, by_layer
from bridle.gguf.rope import read_line
from bridle.gguf.shards import GgufModel
from bridle.gguf.sliding_window import read_window_in_some, write_window_in_some

_FULL = "full_attention"
_SHARED = "attention.shared_kv_layers"


def read_mixed(model: GgufModel, arch: str, config: Config) -> None:
    """Read the sizes of heads and MLPs, the windows, and the number of layers that use another layer's keys and
    values."""
    count = config["num_hidden_layers"]
    read_window_in_some(model, arch, config)
    full = [layer for layer in range(count) if config["layer_types"][layer] == _FULL]
    if not full or len(full) == count:
        raise UnsupportedModel(f"{model.path}: {arch} needs layers with and layers without a sliding window")
    sliding = next(layer for layer in range(count) if layer not in full)
    heads = by_layer(model, f"{arch}.attention.head_count_kv", count)
    widths = by_layer(model, f"{arch}.feed_forward_length", count)
    if not all((*heads, *widths)):
        raise UnsupportedModel(f"{model.path} has layers without key heads or without an MLP")
    shares_weights = f"blk.{full[0]}.attn_v.weight" not in model.tensors
    if heads[full[0]] != heads[sliding] and not shares_weights:
        raise UnsupportedModel(f"{model.path}: layers with their own value weights must have equally many key heads")
    config |= {
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "num_key_value_heads": heads[sliding],
        "num_global_key_value_heads": heads[full[0]],
        "attention_k_eq_v": shares_weights,
        "head_dim": model.integer(f"{arch}.attention.key_length_swa", low=1, high=MAX_SIDE),
        "global_head_dim": model.integer(f"{arch}.attention.key_length", low=1, high=MAX_SIDE),
        "num_kv_shared_layers": model.integer(f"{arch}.{_SHARED}", 0, 0, count - 1),
        "rope_parameters": _read_rotations(model, arch),
    }
    _read_inputsby_layer(model, arch, config)
    _read_experts(model, arch, config)


def _read_rotations(model: GgufModel, arch: str) -> Config:
    """Read the rotary positions. Layers without a window rotate only the first values of a head. The file has huge
    frequency divisors for the other values of a head, which do not rotate."""
    divisors = read_line(model, "rope_freqs.weight") if "rope_freqs.weight" in model.tensors else [1.0]
    width = model.integer(f"{arch}.attention.key_length_swa", low=1, high=MAX_SIDE)
    rotated = model.integer(f"{arch}.rope.dimension_count_swa", width, 1, width)
    return {
        _FULL: {
            "rope_type": "proportional",
            "partial_rotary_factor": sum(divisor == 1.0 for divisor in divisors) / len(divisors),
            "rope_theta": model.real(f"{arch}.rope.freq_base", 1_000_000.0),
        },
        "sliding_attention": {
            "rope_type": "default",
            "partial_rotary_factor": rotated / width,
            "rope_theta": model.real(f"{arch}.rope.freq_base_swa", 10_000.0),
        },
    }


def _read_inputsby_layer(model: GgufModel, arch: str, config: Config) -> None:
    config["hidden_size_per_layer_input"] = model.integer(f"{arch}.embedding_length_per_layer_input", 0, 0, MAX_SIDE)
    entry = model.tensors.get("per_layer_token_embd.weight")
    config["vocab_size_per_layer_input"] = 0 if entry is None else entry.shape[0]


def _read_experts(model: GgufModel, arch: str, config: Config) -> None:
    count = model.integer(f"{arch}.expert_count", 0, 0, 1 << 16)
    if not count:
        return
    config |= {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": model.integer(f"{arch}.expert_used_count", low=1, high=count),
        "moe_intermediate_size": model.integer(f"{arch}.expert_feed_forward_length", low=1, high=MAX_SIDE),
    }


def write_mixed(config: Any, put: Put) -> None:
    layers = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    full, sliding = (layers[list(config.layer_types).index(kind)] for kind in (_FULL, "sliding_attention"))
    rope = config.rope_parameters
    put("attention.head_count_kv", [int(layer.num_key_value_heads) for layer in layers])
    for key, size in (("key_length", full.head_dim), ("key_length_swa", sliding.head_dim)):
        put(f"attention.{key}", int(size))
        put(f"attention.{key.replace('key', 'value')}", int(size))
    put("rope.dimension_count", int(full.head_dim))
    put("rope.dimension_count_swa", int(sliding.head_dim))
    put("rope.freq_base", float(rope[_FULL]["rope_theta"]))
    put("rope.freq_base_swa", float(rope["sliding_attention"]["rope_theta"]))
    if rope[_FULL]["rope_type"] != "proportional" or rope["sliding_attention"]["rope_type"] != "default":
        raise UnsupportedModel("RoPE scaling of this family cannot be written to a GGUF file")
    write_window_in_some(config, put)
    first = config.num_hidden_layers - config.num_kv_shared_layers
    wide = 2 if config.use_double_wide_mlp else 1
    widths = [config.intermediate_size * (wide if layer >= first else 1) for layer in range(config.num_hidden_layers)]
    put("feed_forward_length", widths)
    put(_SHARED, int(config.num_kv_shared_layers))
    put("embedding_length_per_layer_input", int(config.hidden_size_per_layer_input or 0))
    if config.enable_moe_block:
        put("expert_count", int(config.num_experts))
        put("expert_used_count", int(config.top_k_experts))
        put("expert_feed_forward_length", int(config.moe_intermediate_size))


def divisors(config: Any) -> list[float]:
    """Return the divisors of the frequencies of layers without a window. The divisors encode which values of a head
    rotate."""
    size = config.per_layer_config[list(config.layer_types).index(_FULL)].head_dim
    rotated = int(size * config.rope_parameters[_FULL]["partial_rotary_factor"] / 2)
    return [1.0] * rotated + [1e30] * (size // 2 - rotated)


def unread_tensors(model: GgufModel) -> set[str]:
    """Return the names of the key and value tensors of layers that use the keys and values of other layers."""
    arch = model.text("general.architecture")
    shared = model.integer(f"{arch}.{_SHARED}", 0, 0, MAX_SIDE)
    last = model.integer(f"{arch}.block_count", low=1, high=MAX_SIDE)
    names = ("attn_k", "attn_v", "attn_k_norm")
    return {f"blk.{layer}.{name}.weight" for layer in range(last - shared, last) for name in names}
