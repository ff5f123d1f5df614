"""Converts the configuration of a GGUF file to a `config.json`, and back.

Each metadata key corresponds to a field of the transformers configuration. This module converts the fields that
families share; `bridle.gguf.traits` converts all other fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bridle.errors import UnsupportedModel
from bridle.gguf.families import BY_MODEL_TYPE, FAMILIES, known_architectures
from bridle.gguf.family import GgufFamily
from bridle.gguf.fields import MAX_SIDE, Config, Put, Reader, Writer, by_layer, has, head_dim, key_heads, one_of
from bridle.gguf.mixed_layers import read_mixed, write_mixed
from bridle.gguf.mla import read_latent, write_latent, write_whole_latent
from bridle.gguf.moe import SIGMOID, read_draft_layers
from bridle.gguf.rope import read_rotation, write_rotation
from bridle.gguf.shards import GgufModel
from bridle.gguf.traits import TRAITS
from bridle.gguf.varied_layers import read_paired_kinds, read_varied, write_paired_kinds, write_varied
from bridle.safe_repr import short_repr

MAX_LAYERS = 1 << 12

#: Fields of whole numbers in every family, by key.
_COUNTS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
#: The context length that files have for models without a limit.
_MOST_TOKENS = 1 << 20
_NORM_KEYS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")


def _is_sigmoid(model: GgufModel, arch: str) -> bool:
    """Return whether the router chooses experts by a sigmoid. Files without a metadata key for the routing function are
    of DeepSeek V2, or of GLM-4.7-Flash, whose router has a bias."""
    kind = model.integer(f"{arch}.expert_gating_func", 0)
    return kind == SIGMOID or (kind == 0 and has(model, "exp_probs_b.bias"))


#: Architectures that are used for several families, with the function that chooses the family. Mistral cannot be
#: distinguished from Llama.
_CHOICES: dict[str, Callable[[GgufModel, str], str]] = {
    "llama": lambda model, arch: "mixtral" if model.integer(f"{arch}.expert_count", 0) else "llama",
    "deepseek2": lambda model, arch: "deepseek_v3" if _is_sigmoid(model, arch) else "deepseek_v2",
    "olmo2": lambda model, arch: "olmo3" if model.integer(f"{arch}.attention.sliding_window", 0) else "olmo2",
    "granitemoe": lambda model, arch: (
        "granitemoeshared" if model.integer(f"{arch}.expert_shared_feed_forward_length", 0) else "granitemoe"
    ),
    "granite_swa": lambda model, arch: "granitemoe_swa" if model.integer(f"{arch}.expert_count", 0) else "granite_swa",
    "granitehybrid": lambda model, arch: "granitemoehybrid" if f"{arch}.embedding_scale" in model.metadata else "bamba",
    "mamba": lambda model, arch: "falcon_mamba" if model.flag(f"{arch}.ssm.dt_b_c_rms", False) else "mamba",
}
#: Architectures that equal another one under another name.
_SAME = {"nemotron_h": "nemotron_h_moe"}


def find_family(model: GgufModel) -> GgufFamily:
    """Return the family of a file. Raises `UnsupportedModel` for an unknown architecture."""
    arch = model.text("general.architecture") or ""
    if arch in _CHOICES:
        return BY_MODEL_TYPE[_CHOICES[arch](model, arch)]
    family = next((family for family in FAMILIES if family.arch == _SAME.get(arch, arch)), None)
    if family is None:
        raise UnsupportedModel(
            f"{model.path} has architecture {short_repr(arch)}; supported are {', '.join(known_architectures())}"
        )
    return replace(family, arch=arch)


def check_causal(model: GgufModel) -> None:
    """Raise `UnsupportedModel` for encoders and for diffusion models, whose tokens attend to later ones."""
    arch = model.text("general.architecture")
    if model.metadata.get(f"{arch}.attention.causal") is False:
        raise UnsupportedModel(
            f"{model.path}: this {short_repr(arch)} has bidirectional attention; bridle reads GGUF files of causal "
            "models only"
        )


def read_config(model: GgufModel, family: GgufFamily) -> Config:
    """Return the fields of `config.json`. Raises `UnsupportedModel` if a metadata key is missing, or has no counterpart
    in transformers."""
    arch = family.arch
    config: Config = {"model_type": family.model_type}
    for key, field in _counts(family).items():
        instead = f"{arch}.expert_feed_forward_length" if key == "feed_forward_length" else ""
        default = model.metadata.get(instead)  # of models whose layers all have experts
        config[field] = model.integer(f"{arch}.{key}", default, low=1, high=MAX_SIDE)
    most = min(MAX_LAYERS, len(model.tensors))
    if config["num_hidden_layers"] > most:
        raise UnsupportedModel(f"{model.path} claims {config['num_hidden_layers']} layers; at most {most} are possible")
    if "draft layers" in family.reads:  # first, because lists have an entry for these layers
        read_draft_layers(model, arch, config)
    _LAYOUTS[family.layout][0](model, arch, config)
    if not family.norm_eps:
        config[family.layer_norm or family.norm_field] = _read_eps(model, arch, bool(family.layer_norm))
    config["vocab_size"] = _num_tokens(model)
    config["tie_word_embeddings"] = "output.weight" not in model.tensors
    if family.has_rotation:
        config["rope_parameters"] = read_rotation(model, arch, config)
    config |= dict(family.constants) | {field.name: field.read(model, arch) for field in family.fields}
    for field, pairs in family.kinds:
        config[field] = _layer_kinds(model, arch, pairs, config["num_hidden_layers"])
    for name in family.reads:
        TRAITS[name][0](model, arch, config)
    return config | _special_ids(model)


def _counts(family: GgufFamily) -> dict[str, str]:
    return {key: field for key, field in _COUNTS.items() if key not in family.lacks}


def _read_eps(model: GgufModel, arch: str, is_layer_norm: bool) -> float:
    """Return the epsilon of the norms. Some files of models with RMS norms store the epsilon under the metadata key for
    layer norms."""
    other = model.metadata.get(f"{arch}.{_NORM_KEYS[1]}") if not is_layer_norm else None
    return model.real(f"{arch}.{_NORM_KEYS[is_layer_norm]}", other)


def _layer_kinds(model: GgufModel, arch: str, pairs: tuple[tuple[str, str], ...], count: int) -> list[str]:
    kinds = [
        next((kind for tensor, kind in pairs if f"blk.{layer}.{tensor}" in model.tensors), None)
        for layer in range(count)
    ]
    if None in kinds:
        raise UnsupportedModel(f"{model.path}: layer {kinds.index(None)} has the tensors of no layer type of {arch}")
    return [str(kind) for kind in kinds]


def _read_heads(model: GgufModel, arch: str, config: Config) -> None:
    heads = config["num_attention_heads"]
    key = f"{arch}.attention.head_count_kv"
    config["num_key_value_heads"] = one_of(model, key, by_layer(model, key, config["num_hidden_layers"], heads))
    if config["num_key_value_heads"] > heads:
        raise UnsupportedModel(f"{model.path} has {config['num_key_value_heads']} key heads for {heads} query heads")
    config["head_dim"] = model.integer(f"{arch}.attention.key_length", config["hidden_size"] // heads, 1, MAX_SIDE)
    if model.integer(f"{arch}.attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise UnsupportedModel(f"{model.path} has different key and value sizes, which is not supported")


def _write_heads(config: Any, put: Put) -> None:
    put("attention.head_count_kv", key_heads(config))
    put("attention.key_length", head_dim(config))
    put("attention.value_length", head_dim(config))


def _read_none(model: GgufModel, arch: str, config: Config) -> None:
    return None


def _write_none(config: Any, put: Put) -> None:
    put("attention.head_count", 0)
    put("feed_forward_length", 0)


_LAYOUTS: dict[str, tuple[Reader, Writer]] = {
    "": (_read_heads, _write_heads),
    "latent": (read_latent, write_latent),
    "whole latent": (read_latent, write_whole_latent),
    "mixed": (read_mixed, write_mixed),
    "varied": (read_varied, write_varied),
    "paired kinds": (read_paired_kinds, write_paired_kinds),
    "none": (_read_none, _write_none),
}


def _num_tokens(model: GgufModel) -> int:
    entry = model.tensors.get("token_embd.weight")
    if entry is None or len(entry.shape) != 2:
        raise UnsupportedModel(f"{model.path} has no token embedding, so it is not a complete model")
    return entry.shape[0]


def _special_ids(model: GgufModel) -> Config:
    ids: Config = {}
    for role, field in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        value = model.metadata.get(f"tokenizer.ggml.{role}_token_id")
        ids[field] = value if isinstance(value, int) and 0 <= value < _num_tokens(model) else None
    return ids


def write_config(config: Any, family: GgufFamily, put: Put) -> None:
    """Write the transformers configuration as metadata by calls of `put`, whose keys lack the architecture prefix.
    Raises `UnsupportedModel` for settings that a GGUF file cannot express."""
    for name, value in family.constants:
        if getattr(config, name, value) != value:
            raise UnsupportedModel(f"{name}={getattr(config, name)!r} of this family cannot be stored in a GGUF file")
    for key, field in _counts(family).items():
        put(key, int(getattr(config, field, None) or _MOST_TOKENS))
    _LAYOUTS[family.layout][1](config, _listing(config, family, put))
    eps = family.norm_eps or float(getattr(config, family.layer_norm or family.norm_field))
    put(_NORM_KEYS[bool(family.layer_norm or family.norm_eps)], eps)
    put("vocab_size", int(config.vocab_size))
    if family.has_rotation:
        write_rotation(config, family.arch, put)
    for each in family.fields:
        each.write(config, put)
    for name in family.reads:
        TRAITS[name][1](config, put)


def _listing(config: Any, family: GgufFamily, put: Put) -> Put:
    """Return `put`, or a variant of it for families whose files list the number of key heads of each layer."""
    if not family.lists_heads:
        return put
    attends = [kind == "full_attention" for kind in config.layer_types]

    def put_list(key: str, value: Any) -> None:
        put(key, [value * each for each in attends] if key == "attention.head_count_kv" else value)

    return put_list
