"""What families with experts have beyond the fields that `bridle.gguf.traits` reads: gates that are clamped, layers
without experts before those with them, experts that all tokens share, and ways of choosing.
"""

from __future__ import annotations

from typing import Any

from bridle.errors import UnsupportedModel
from bridle.gguf.fields import MAX_SIDE, Config, Put, Reader, Writer
from bridle.gguf.shards import GgufModel


def _read_like_layers(model: GgufModel, arch: str, config: Config) -> None:
    """Experts as wide as the layers without any would be."""
    width = model.integer(f"{arch}.expert_feed_forward_length", config["intermediate_size"], 1, MAX_SIDE)
    if width != config["intermediate_size"]:
        raise UnsupportedModel(
            f"{model.path} has experts of {width} numbers, and a feed-forward length of {config['intermediate_size']}; "
            "they are read where both are the same"
        )


def _write_like_layers(config: Any, put: Put) -> None:
    put("expert_feed_forward_length", int(config.intermediate_size))


def _read_nothing(model: GgufModel, arch: str, config: Config) -> None:
    return None


def _write_clamped_gates(config: Any, put: Put) -> None:
    if (config.swiglu_alpha, config.swiglu_limit) != (1.702, 7.0):
        raise UnsupportedModel(
            f"swiglu_alpha {config.swiglu_alpha} and swiglu_limit {config.swiglu_limit} cannot be said in a GGUF file"
        )


TRAITS: dict[str, tuple[Reader, Writer]] = {
    "experts like layers": (_read_like_layers, _write_like_layers),
    "clamped gates": (_read_nothing, _write_clamped_gates),
}
