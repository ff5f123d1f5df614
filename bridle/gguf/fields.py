"""Helpers shared by all parts of reading and writing configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bridle.gguf.shards import GgufModel

Config = dict[str, Any]
#: Takes a key without the architecture, and its value.
Put = Callable[[str, Any], None]
Reader = Callable[[GgufModel, str, Config], None]
Writer = Callable[[Any, Put], None]

#: The longest side of a tensor that a configuration may imply.
MAX_SIDE = 1 << 24


def head_dim(config: Any) -> int:
    """Numbers of one head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def has(model: GgufModel, name: str) -> bool:
    """Return whether the first layer has a tensor of that name."""
    return f"blk.0.{name}" in model.tensors
