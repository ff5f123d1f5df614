"""Helper functions that convert fields between GGUF metadata and transformers configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bridle.errors import UnsupportedModel
from bridle.gguf.shards import GgufModel

Config = dict[str, Any]
#: Writes a key, given without the architecture, and its value.
Put = Callable[[str, Any], None]
Reader = Callable[[GgufModel, str, Config], None]
Writer = Callable[[Any, Put], None]

#: The longest side of a tensor that a configuration may imply.
MAX_SIDE = 1 << 24


def head_dim(config: Any) -> int:
    """Return the number of values in one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def read_nothing(model: GgufModel, arch: str, config: Config) -> None:
    """Read nothing. `read_nothing` is the reader of a property that files do not store."""


def write_nothing(config: Any, put: Put) -> None:
    """Write nothing. `write_nothing` is the writer of a property that follows from keys which other writers write."""


def key_heads(config: Any) -> int:
    """Return the number of key heads. Older families store the number of key heads in another field, or have as many
    key heads as query heads."""
    if getattr(config, "new_decoder_architecture", False):
        return int(config.num_kv_heads)
    if getattr(config, "multi_query", False):
        return 1
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def has(model: GgufModel, name: str) -> bool:
    """Return whether a layer has a tensor called `name`."""
    return f"blk.0.{name}" in model.tensors or any(
        each.startswith("blk.") and each.split(".", 2)[2:] == [name] for each in model.tensors
    )


class Field(NamedTuple):
    """A field of the transformers configuration, and the key under which a file stores it. `kind` is int, float or
    bool. If there is no `default`, the file must have the key."""

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
    """Return one number per layer. A file stores one number for all layers, or a list."""
    value = model.metadata.get(key)
    if not isinstance(value, np.ndarray):
        return [model.integer(key, default, 0, MAX_SIDE)] * count
    numbers = [int(each) for each in value[:count]]
    if len(numbers) != count or not all(0 <= each <= MAX_SIDE for each in numbers):
        raise UnsupportedModel(f"{model.path}: {key} must have a number of at least 0 for each of the {count} layers")
    return numbers


def one_of(model: GgufModel, key: str, numbers: list[int]) -> int:
    """Return the one nonzero value in `numbers`, which has one value per layer. Raises `UnsupportedModel` if there are
    different nonzero values."""
    found = {number for number in numbers if number}
    if len(found) != 1:
        raise UnsupportedModel(f"{model.path}: {key} must be the same number, not 0, in all layers")
    return found.pop()
