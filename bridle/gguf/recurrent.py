"""Reads and writes the sizes of recurrent layers. Files describe all kinds of recurrent layers with the same few
metadata keys."""

from __future__ import annotations

from typing import Any, NamedTuple

from bridle.errors import UnsupportedModel
from bridle.gguf.fields import MAX_SIDE, Config, Put, Reader, Writer, has, read_nothing, write_nothing
from bridle.gguf.shards import GgufModel


def _divided(model: GgufModel, key: str, whole: int, parts: int) -> int:
    if whole % parts:
        raise UnsupportedModel(f"{model.path}: key {key} is {whole}; it must be a multiple of {parts}")
    return whole // parts


def _size(model: GgufModel, arch: str, name: str) -> int:
    return model.integer(f"{arch}.ssm.{name}", low=1, high=MAX_SIDE)


# -- delta rule ---------------------------------------------------------------------------------------------------


def _read_delta(model: GgufModel, arch: str, config: Config) -> None:
    keys, values = _size(model, arch, "group_count"), _size(model, arch, "time_step_rank")
    _divided(model, f"{arch}.ssm.time_step_rank", values, keys)
    config |= {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": _size(model, arch, "state_size"),
        "linear_value_head_dim": _divided(model, f"{arch}.ssm.inner_size", _size(model, arch, "inner_size"), values),
        "linear_conv_kernel_dim": _size(model, arch, "conv_kernel"),
    }


def _write_delta(config: Any, put: Put) -> None:
    put("ssm.group_count", int(config.linear_num_key_heads))
    put("ssm.time_step_rank", int(config.linear_num_value_heads))
    put("ssm.state_size", int(config.linear_key_head_dim))
    put("ssm.inner_size", int(config.linear_num_value_heads) * int(config.linear_value_head_dim))
    put("ssm.conv_kernel", int(config.linear_conv_kernel_dim))
    put("attention.recurrent_layers", [kind == "linear_attention" for kind in config.layer_types])


def _read_channel_delta(model: GgufModel, arch: str, config: Config) -> None:
    """Read Kimi's recurrent heads, whose keys and values have the same size."""
    config |= {
        "linear_num_heads": config["num_attention_heads"],
        "linear_head_dim": model.integer(f"{arch}.kda.head_dim", low=1, high=MAX_SIDE),
        "linear_conv_kernel_dim": _size(model, arch, "conv_kernel"),
    }


def _write_channel_delta(config: Any, put: Put) -> None:
    if config.linear_num_heads != config.num_attention_heads:
        raise UnsupportedModel("a GGUF file of this family needs the same number of heads in all layers")
    put("kda.head_dim", int(config.linear_head_dim))
    put("ssm.conv_kernel", int(config.linear_conv_kernel_dim))


def _write_unrotated_part(config: Any, put: Put) -> None:
    """Write the size of the part of each head that has rotary positions in other families. Kimi has no rotary
    positions, but its files need this metadata key."""
    put("rope.dimension_count", int(config.qk_rope_head_dim))


# -- Mamba --------------------------------------------------------------------------------------------------------


class _Names(NamedTuple):
    """The configuration fields of a family that hold a Mamba layer's sizes; "" for a size that the family lacks."""

    state: str
    kernel: str
    expand: str
    rank: str  # rank of the step, or number of heads
    bias: str
    head: str = ""
    groups: str = ""
    inner: str = ""


_GRANITE = _Names(
    "mamba_d_state",
    "mamba_d_conv",
    "mamba_expand",
    "mamba_n_heads",
    "mamba_conv_bias",
    "mamba_d_head",
    "mamba_n_groups",
)
_NEMOTRON = _Names(
    "ssm_state_size", "conv_kernel", "expand", "mamba_num_heads", "use_conv_bias", "mamba_head_dim", "n_groups"
)
_MAMBA_2 = _Names("state_size", "conv_kernel", "expand", "num_heads", "use_conv_bias", "head_dim", "n_groups")
_JAMBA = _Names("mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank", "mamba_conv_bias")
_MAMBA = _Names("state_size", "conv_kernel", "expand", "time_step_rank", "use_conv_bias")


def _mamba(names: _Names) -> tuple[Reader, Writer]:
    """Return the reader and the writer of Mamba sizes for a family whose configuration has these field names."""

    def read(model: GgufModel, arch: str, config: Config) -> None:
        inner, rank = _size(model, arch, "inner_size"), _size(model, arch, "time_step_rank")
        config |= {
            names.state: _size(model, arch, "state_size"),
            names.kernel: _size(model, arch, "conv_kernel"),
            names.rank: rank,
            names.expand: max(inner // config["hidden_size"], 1),
            names.bias: has(model, "ssm_conv1d.bias"),
        }
        if names.inner:
            config[names.inner] = inner
        if names.head:
            config[names.head] = _divided(model, f"{arch}.ssm.inner_size", inner, rank)
            config[names.groups] = _size(model, arch, "group_count")
            _divided(model, f"{arch}.ssm.inner_size", inner, config[names.groups])

    def write(config: Any, put: Put) -> None:
        rank = int(getattr(config, names.rank))
        head = int(getattr(config, names.head)) if names.head else 0
        put("ssm.state_size", int(getattr(config, names.state)))
        put("ssm.conv_kernel", int(getattr(config, names.kernel)))
        put("ssm.time_step_rank", rank)
        put("ssm.inner_size", rank * head or int(getattr(config, names.expand)) * int(config.hidden_size))
        if names.groups:
            put("ssm.group_count", int(getattr(config, names.groups)))

    return read, write


# -- which layers -------------------------------------------------------------------------------------------------


def _period(model: GgufModel, what: str, layers: list[bool]) -> tuple[int, int]:
    """Return the period of the layers of one kind, and the number of the first layer of this kind. `layers` has one
    truth value per layer."""
    places = [number for number, is_one in enumerate(layers) if is_one]
    period = places[1] - places[0] if len(places) > 1 else len(layers)
    if not places or [number % period == places[0] % period for number in range(len(layers))] != layers:
        raise UnsupportedModel(f"{model.path}: the layers with {what} must repeat after a fixed number of layers")
    return period, places[0]


def _read_periods(model: GgufModel, arch: str, config: Config) -> None:
    """Read the periods of Jamba's attention layers and expert layers. Each kind repeats after a fixed number of
    layers."""
    layers = range(config["num_hidden_layers"])
    for what, tensor in (("attn", "attn_q"), ("expert", "ffn_gate_inp")):
        found = [f"blk.{layer}.{tensor}.weight" in model.tensors for layer in layers]
        config[f"{what}_layer_period"], config[f"{what}_layer_offset"] = _period(model, what, found)


def _read_attention_layers(model: GgufModel, arch: str, config: Config) -> None:
    """Read the numbers of Bamba's attention layers. Bamba's attention layers always rotate one half of each head."""
    if config["rope_parameters"].get("partial_rotary_factor") != 0.5:
        raise UnsupportedModel(f"{model.path}: {arch}.rope.dimension_count must be half the head size")
    layers = range(config["num_hidden_layers"])
    config["attn_layer_indices"] = [layer for layer in layers if f"blk.{layer}.attn_q.weight" in model.tensors]


def _read_widths(model: GgufModel, arch: str, config: Config) -> None:
    """Read Nemotron's MLP width. Files have the width 0 for layers without an MLP."""
    widths = {
        entry.shape[0] for name, entry in model.tensors.items() if name.endswith(".ffn_up.weight") and entry.shape
    }
    if len(widths) > 1:
        raise UnsupportedModel(f"{model.path}: {arch} needs the same MLP width in all layers")
    config["intermediate_size"] = widths.pop() if widths else config["hidden_size"]


def _read_between(model: GgufModel, arch: str, config: Config) -> None:
    """Read the width of the compressed hidden states on which Nemotron's experts compute."""
    config["moe_latent_size"] = model.integer(f"{arch}.moe_latent_size", 0, 0, MAX_SIDE) or None


def _write_between(config: Any, put: Put) -> None:
    if config.moe_latent_size:
        put("moe_latent_size", int(config.moe_latent_size))


def _write_widths(config: Any, put: Put) -> None:
    kinds = list(config.layer_types)
    wide = {"mlp": int(config.intermediate_size), "moe": int(config.moe_intermediate_size)}
    put("feed_forward_length", [wide.get(kind, 0) for kind in kinds])


def _write_adjusted_width(config: Any, put: Put) -> None:
    """Write LFM2's MLP width. The configuration may have another width, from which the model computes this width."""
    width = int(config.intermediate_size)
    if config.block_auto_adjust_ff_dim:
        width = int(float(config.block_ffn_dim_multiplier or 1.0) * int(2 * width / 3))
        multiple = int(config.block_multiple_of)
        width = -(-width // multiple) * multiple
    put("feed_forward_length", width)


def _read_adjusted_width(model: GgufModel, arch: str, config: Config) -> None:
    config["intermediate_size"] = model.integer(f"{arch}.feed_forward_length", low=1, high=MAX_SIDE)
    config["block_auto_adjust_ff_dim"] = False


def _read_granite_experts(model: GgufModel, arch: str, config: Config) -> None:
    """Read Granite 4's experts: an MLP that processes all tokens, and optional routed experts."""
    config["num_local_experts"] = model.integer(f"{arch}.expert_count", 0, 0, 1 << 16)
    used = model.integer(f"{arch}.expert_used_count", 0, 0, 1 << 16)
    config["num_experts_per_tok"] = min(used, config["num_local_experts"])
    shared = model.integer(f"{arch}.expert_shared_feed_forward_length", 0, 0, MAX_SIDE)
    config["shared_intermediate_size"] = shared or config["intermediate_size"]


def _write_granite_experts(config: Any, put: Put) -> None:
    if not config.num_local_experts:
        raise UnsupportedModel("a model of this family without experts cannot be written to a GGUF file")
    put("expert_count", config.num_local_experts)
    put("expert_used_count", config.num_experts_per_tok)
    put("expert_shared_feed_forward_length", int(config.shared_intermediate_size))


def _read_rotated(model: GgufModel, arch: str, config: Config) -> None:
    config["position_embedding_type"] = "rope" if model.flag(f"{arch}.rope.scaling.finetuned", True) else None


def _write_rotated(config: Any, put: Put) -> None:
    put("rope.scaling.finetuned", config.position_embedding_type == "rope")


def _read_norm_of_mamba(model: GgufModel, arch: str, config: Config) -> None:
    config |= {"mamba_rms_norm": has(model, "ssm_norm.weight"), "mamba_norm_before_gate": False}


def _write_norm_of_mamba(config: Any, put: Put) -> None:
    if config.mamba_rms_norm and config.mamba_norm_before_gate:
        raise UnsupportedModel("mamba_norm_before_gate=True of this family cannot be stored in a GGUF file")


def _write_norms_of_steps(config: Any, put: Put) -> None:
    put("ssm.dt_b_c_rms", config.model_type == "falcon_mamba")


def _write_both_epsilons(config: Any, put: Put) -> None:
    """Write the epsilon of layer norms for Nemotron-H. llama.cpp requires this metadata key, although only draft layers
    have layer norms."""
    put("attention.layer_norm_epsilon", float(config.layer_norm_epsilon))


TRAITS: dict[str, tuple[Reader, Writer]] = {
    "granite experts": (_read_granite_experts, _write_granite_experts),
    "rotated or not": (_read_rotated, _write_rotated),
    "norm of mamba": (_read_norm_of_mamba, _write_norm_of_mamba),
    "norms of steps": (read_nothing, _write_norms_of_steps),
    "delta rule": (_read_delta, _write_delta),
    "delta rule by channel": (_read_channel_delta, _write_channel_delta),
    "unrotated part": (read_nothing, _write_unrotated_part),
    "mamba 2 of granite": _mamba(_GRANITE),
    "mamba 2 of falcon": _mamba(_GRANITE._replace(inner="mamba_d_ssm")),
    "mamba 2 of nemotron": _mamba(_NEMOTRON),
    "mamba 2": _mamba(_MAMBA_2),
    "mamba of jamba": _mamba(_JAMBA),
    "mamba": _mamba(_MAMBA),
    "periods": (_read_periods, write_nothing),
    "attention layers": (_read_attention_layers, write_nothing),
    "widths": (_read_widths, _write_widths),
    "experts between": (_read_between, _write_between),
    "both epsilons": (read_nothing, _write_both_epsilons),
    "adjusted width": (_read_adjusted_width, _write_adjusted_width),
}
