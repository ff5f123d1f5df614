"""The configuration of a GGUF file as a `config.json`, and back.

Each key of the metadata is a field of the library's configuration under another name; what a family has beyond the
common ones stands in `bridle.gguf.traits`.
"""

from __future__ import annotations

from typing import Any

from bridle.errors import UnsupportedModel
from bridle.gguf.families import GgufFamily, family_of, known_architectures
from bridle.gguf.fields import MAX_SIDE, Config, Put, head_dim
from bridle.gguf.mixed_layers import read_mixed, write_mixed
from bridle.gguf.mla import read_latent, write_latent
from bridle.gguf.moe import SIGMOID
from bridle.gguf.rope import read_rotation, write_rotation
from bridle.gguf.shards import GgufModel
from bridle.gguf.traits import TRAITS
from bridle.safe_repr import short_repr

MAX_LAYERS = 1 << 12

#: Whole numbers that every family has: key -> field.
_COUNTS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_NORM_KEYS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")


def find_family(model: GgufModel) -> GgufFamily:
    """Raises `UnsupportedModel` for an architecture that is not known."""
    arch = model.text("general.architecture")
    has_window = model.integer(f"{arch}.attention.sliding_window", 0) > 0
    is_sigmoid = model.integer(f"{arch}.expert_gating_func", 0) == SIGMOID
    family = family_of(arch, model.integer(f"{arch}.expert_count", 0) > 0, has_window, is_sigmoid)
    if family is None:
        raise UnsupportedModel(
            f"{model.path} is of the architecture {short_repr(arch)}; known are {', '.join(known_architectures())}"
        )
    return family


def check_causal(model: GgufModel) -> None:
    """Raises `UnsupportedModel` for encoders and for models that write by diffusion: their tokens see later ones."""
    arch = model.text("general.architecture")
    if model.metadata.get(f"{arch}.attention.causal") is False:
        raise UnsupportedModel(
            f"{model.path}: tokens of this {short_repr(arch)} see later ones; bridle computes what writes one after "
            "another"
        )


def read_config(model: GgufModel, family: GgufFamily) -> Config:
    """The fields of `config.json`. Raises `UnsupportedModel` for a field that is missing, or has no counterpart."""
    arch = family.arch
    config: Config = {"model_type": family.model_type}
    for key, field in _counts(family).items():
        config[field] = model.integer(f"{arch}.{key}", low=1, high=MAX_SIDE)
    most = min(MAX_LAYERS, len(model.tensors))
    if config["num_hidden_layers"] > most:
        raise UnsupportedModel(f"{model.path} claims {config['num_hidden_layers']} layers; it can have {most} at most")
    read_heads = read_latent if family.is_latent else read_mixed if family.is_mixed else _read_heads
    read_heads(model, arch, config)
    if not family.norm_eps:
        config[family.layer_norm or "rms_norm_eps"] = model.real(f"{arch}.{_NORM_KEYS[bool(family.layer_norm)]}")
    config["vocab_size"] = _num_tokens(model)
    config["tie_word_embeddings"] = "output.weight" not in model.tensors
    if not family.is_mixed:
        config["rope_parameters"] = read_rotation(model, arch, config)
    for name in family.reads:
        TRAITS[name][0](model, arch, config)
    return config | _special_ids(model)


def _counts(family: GgufFamily) -> dict[str, str]:
    return {key: field for key, field in _COUNTS.items() if not (family.is_mixed and key == "feed_forward_length")}


def _read_heads(model: GgufModel, arch: str, config: Config) -> None:
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = model.integer(f"{arch}.attention.head_count_kv", heads, 1, heads)
    config["head_dim"] = model.integer(f"{arch}.attention.key_length", config["hidden_size"] // heads, 1, MAX_SIDE)
    if model.integer(f"{arch}.attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise UnsupportedModel(f"{model.path} has values of another length than keys, which is not read")


def _write_heads(config: Any, put: Put) -> None:
    put("attention.head_count_kv", int(config.num_key_value_heads or config.num_attention_heads))
    put("attention.key_length", head_dim(config))
    put("attention.value_length", head_dim(config))


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


def write_config(config: Any, family: GgufFamily, put: Put) -> None:
    """Write the library's configuration as metadata; `put` gets keys without the architecture. Raises
    `UnsupportedModel` for settings that a GGUF file cannot express."""
    for key, field in _counts(family).items():
        put(key, int(getattr(config, field)))
    (write_latent if family.is_latent else write_mixed if family.is_mixed else _write_heads)(config, put)
    eps = family.norm_eps or float(getattr(config, family.layer_norm or "rms_norm_eps"))
    put(_NORM_KEYS[bool(family.layer_norm or family.norm_eps)], eps)
    put("vocab_size", int(config.vocab_size))
    if not family.is_mixed:
        write_rotation(config, family.arch, put)
    for name in family.reads:
        TRAITS[name][1](config, put)
