"""Properties of model families that store queries, keys and values in one matrix: heads, MLP widths and position
biases."""

from __future__ import annotations

from typing import Any

from bridle.errors import UnsupportedModel
from bridle.gguf.fields import MAX_SIDE, Config, Put, Reader, Writer, has, key_heads, write_nothing
from bridle.gguf.shards import GgufModel


def _drop_heads(model: GgufModel, arch: str, config: Config, wanted: int) -> None:
    """Drop `num_key_value_heads` and `head_dim`, which the configurations of families with joined heads lack. Raises
    `UnsupportedModel` if these two fields differ from the values that the family implies."""
    found = (config.pop("num_key_value_heads"), config.pop("head_dim"))
    if found != (wanted, config["hidden_size"] // config["num_attention_heads"]):
        raise UnsupportedModel(f"{model.path}: {arch} with {found[0]} key heads of size {found[1]} is not supported")


def _read_equal_heads(model: GgufModel, arch: str, config: Config) -> None:
    _drop_heads(model, arch, config, config["num_attention_heads"])


def _read_one_key_head(model: GgufModel, arch: str, config: Config) -> None:
    _drop_heads(model, arch, config, 1)
    config["multi_query"] = True


def _write_one_key_head(config: Any, put: Put) -> None:
    if key_heads(config) != 1:
        raise UnsupportedModel("a model of this family with multi_query=False cannot be stored in a GGUF file")


def _read_groups(model: GgufModel, arch: str, config: Config) -> None:
    """Read Falcon's number of key heads, each of which serves a group of query heads. A model with one key head for all
    query heads has one such group."""
    config |= {
        "new_decoder_architecture": True,
        "num_kv_heads": config["num_key_value_heads"],
        "num_ln_in_parallel_attn": 2 if has(model, "attn_norm_2.weight") else 1,
    }
    _drop_heads(model, arch, config, config["num_kv_heads"])


def _write_groups(config: Any, put: Put) -> None:
    put("tensor_data_layout", "jploski")


def _read_four_times(model: GgufModel, arch: str, config: Config) -> None:
    width = model.integer(f"{arch}.feed_forward_length", 4 * config["hidden_size"], 1, MAX_SIDE)
    if width != 4 * config["hidden_size"]:
        raise UnsupportedModel(f"{model.path}: {arch}.feed_forward_length is {width}, not four times the hidden size")


def _write_four_times(config: Any, put: Put) -> None:
    names = ("n_inner", "ffn_hidden_size")
    found = next((getattr(config, name) for name in names if getattr(config, name, None)), 4 * config.hidden_size)
    if found != 4 * config.hidden_size:
        raise UnsupportedModel("a model of this family can be written only if its MLP is 4 hidden sizes wide")
    put("feed_forward_length", int(found))


def _read_biased_positions(model: GgufModel, arch: str, config: Config) -> None:
    """Read MPT's position biases (ALiBi), which grow with the distance between two tokens."""
    most = model.real(f"{arch}.attention.max_alibi_bias", 0.0)
    if most <= 0 or most != int(most):
        raise UnsupportedModel(f"{model.path}: {arch}.attention.max_alibi_bias is {most}; must be a whole number")
    clip = model.real(f"{arch}.attention.clamp_kqv", 0.0) or None
    config["max_seq_len"] = config.pop("max_position_embeddings")
    config["attn_config"] = {"alibi": True, "alibi_bias_max": int(most), "clip_qkv": clip}


def _write_biased_positions(config: Any, put: Put) -> None:
    attention = config.attn_config
    if not attention.alibi or attention.qk_ln or attention.softmax_scale or attention.prefix_lm:
        raise UnsupportedModel("this family is written only with ALiBi, and without qk_ln, softmax_scale and prefix_lm")
    put("attention.max_alibi_bias", float(attention.alibi_bias_max))
    if attention.clip_qkv:
        put("attention.clamp_kqv", float(attention.clip_qkv))


TRAITS: dict[str, tuple[Reader, Writer]] = {
    "equal heads": (_read_equal_heads, write_nothing),
    "one key head": (_read_one_key_head, _write_one_key_head),
    "groups of heads": (_read_groups, _write_groups),
    "four times as wide": (_read_four_times, _write_four_times),
    "biased positions": (_read_biased_positions, _write_biased_positions),
}
