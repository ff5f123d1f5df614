"""Helpers shared by all parts of reading and writing configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bridle.errors import UnsupportedModel
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


def read_nothing(model: GgufModel, arch: str, config: Config) -> None:
    """The reader of a property that a file does not have."""


def write_nothing(config: Any, put: Put) -> None:
    """The writer of a property that is read from fields which others write."""


def key_heads(config: Any) -> int:
    """Heads of keys, which older families call differently, or of which they have as many as of queries."""
    if getattr(config, "new_decoder_architecture", False):
        return int(config.num_kv_heads)
    if getattr(config, "multi_query", False):
        return 1
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def has(model: GgufModel, name: str) -> bool:
    """Return whether some layer has a tensor of that name."""
    return f"blk.0.{name}" in model.tensors or any(
        each.startswith("blk.") and each.split(".", 2)[2:] == [name] for each in model.tensors
    )


class Field(NamedTuple):
    """A field of the library's configuration that a file has under a key of its own. `kind` is int, float or bool;
    without a `default` the file must have it."""

    key: str
    name: str
    default: Any = None
    kind: type = int

    def read(self, model: GgufModel, arch: str) -> Any:
        key = f"{arch}.{self.key}"
        if self.kind is int:
            return model.integer(key, self.default, 0, MAX_SIDE)
        return model.real(key, self.default) if self.kind is float else model.flag(key, bool(self.default))

    def write(self, config: Any, put: Put) -> None:
        put(self.key, self.kind(getattr(config, self.name)))


def by_layer(model: GgufModel, key: str, count: int, default: int | None = None) -> list[int]:
    """A number of each layer, of which a file has one for all or a list."""
    value = model.metadata.get(key)
    if not isinstance(value, np.ndarray):
        return [model.integer(key, default, 0, MAX_SIDE)] * count
    numbers = [int(each) for each in value[:count]]
    if len(numbers) != count or not all(0 <= each <= MAX_SIDE for each in numbers):
        raise UnsupportedModel(f"{model.path}: {key} has no number from 0 for each of its {count} layers")
    return numbers


def one_of(model: GgufModel, key: str, numbers: list[int]) -> int:
    """The number of the layers that have one. Raises `UnsupportedModel` if these differ."""
    found = {number for number in numbers if number}
    if len(found) != 1:
        raise UnsupportedModel(f"{model.path}: {key} differs from layer to layer, or is 0 in all of them")
    return found.pop()
