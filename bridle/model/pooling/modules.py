"""Reads the modules of a sentence-transformers folder as plain data. The modules are the operations on the encoder's
hidden states. `modules.json` names Python classes, which are not imported. For each known class, bridle has its own
implementation. Unknown classes are refused, because the vectors would be wrong without their operation; the error names
the class. This module uses no tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridle.errors import UnsupportedModel
from bridle.model.checkpoint import MAX_JSON, read_json

MODULES_NAME = "modules.json"
MAX_MODULES = 16

#: Pooling modes by their flags, in the order in which sentence-transformers concatenates their vectors.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLING_MODES = tuple(_POOLING_FLAGS.values())
_IDENTITY = "torch.nn.modules.linear.Identity"
#: Activations by the names of their classes.
ACTIVATIONS = {
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    _IDENTITY: "identity",
    "torch.nn.Identity": "identity",
}


@dataclass(frozen=True, slots=True)
class PoolingLayer:
    """Pools a text's hidden states to one vector. With several modes, such as mean and max, their vectors are
    concatenated."""

    modes: tuple[str, ...] = ("mean",)


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer, whose weights are in `folder`, and an activation."""

    folder: str
    in_features: int
    out_features: int
    has_bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A layer norm over `dimension` values, whose weights are in `folder`."""

    folder: str
    dimension: int


@dataclass(frozen=True, slots=True)
class Normalize:
    """Scales vectors to length 1."""


Module = PoolingLayer | Dense | LayerNorm | Normalize


def has_modules(folder: Path) -> bool:
    """Return whether a model folder was saved by sentence-transformers."""
    return (folder / MODULES_NAME).is_file()


def read_modules(folder: Path) -> tuple[Module, ...]:
    """Return the modules after the encoder, the pooling layer first. Raises `UnsupportedModel` for an unknown
    module."""
    entries = _read_list(folder / MODULES_NAME)
    if not entries or _kind(entries[0]) != "Transformer":
        first = _kind(entries[0]) if entries else "nothing"
        raise UnsupportedModel(f"{folder / MODULES_NAME} begins with {first}; it must begin with a Transformer")
    if entries[0].get("path"):
        raise UnsupportedModel(
            f"{folder / MODULES_NAME} has its transformer in {entries[0]['path']!r}; put its files next to "
            "modules.json, as sentence-transformers saves it since version 2"
        )
    steps = tuple(_read_module(folder, entry) for entry in entries[1:])
    if not steps or not isinstance(steps[0], PoolingLayer):
        raise UnsupportedModel(f"{folder / MODULES_NAME} has no pooling after its Transformer")
    if any(isinstance(step, PoolingLayer) for step in steps[1:]):
        raise UnsupportedModel(f"{folder / MODULES_NAME} has more than one pooling module")
    return steps


def _read_list(path: Path) -> list[dict[str, Any]]:
    if path.stat().st_size > MAX_JSON:
        raise UnsupportedModel(f"{path} has {path.stat().st_size} bytes; at most {MAX_JSON} are read")
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UnsupportedModel(f"{path} is not a list of modules")
    if len(entries) > MAX_MODULES:
        raise UnsupportedModel(f"{path} has {len(entries)} modules; at most {MAX_MODULES}")
    return entries


def _kind(entry: dict[str, Any]) -> str:
    """Return the name of an entry's class: without its package if the class is from sentence-transformers, in full
    otherwise."""
    name = str(entry.get("type", ""))[:200]
    return name.rpartition(".")[2] if name.startswith("sentence_transformers.") else name


def _read_module(folder: Path, entry: dict[str, Any]) -> Module:
    kind = _kind(entry)
    read = _READERS.get(kind)
    if read is None:
        known = ", ".join(_READERS)
        raise UnsupportedModel(
            f"{folder / MODULES_NAME} has a module of the unknown type {kind!r}, which its vectors need; "
            f"known are {known}"
        )
    name = entry.get("path", "")
    if not isinstance(name, str) or name != Path(name).name or name == "..":
        raise UnsupportedModel(f"{folder / MODULES_NAME} names a folder outside of the model's folder: {name!r}")
    return read(name, read_json(folder / name / "config.json"))


def _read_pool(name: str, config: dict[str, Any]) -> PoolingLayer:
    if config.get("include_prompt") is False:
        raise UnsupportedModel(f"{name} has include_prompt false, which is not supported")
    told = config.get("pooling_mode")
    modes = [told] if isinstance(told, str) else [m for flag, m in _POOLING_FLAGS.items() if config.get(flag)]
    wrong = [mode for mode in modes if mode not in POOLING_MODES]
    if wrong or not modes:
        raise UnsupportedModel(f"{name} pools by {wrong or 'nothing'}; known are {', '.join(POOLING_MODES)}")
    return PoolingLayer(tuple(modes))


def _read_dense(name: str, config: dict[str, Any]) -> Dense:
    activation = str(config.get("activation_function", _IDENTITY))
    if activation not in ACTIVATIONS:
        raise UnsupportedModel(f"{name} has the activation {activation[:200]!r}; known are {', '.join(ACTIVATIONS)}")
    sizes = _size(name, config, "in_features"), _size(name, config, "out_features")
    return Dense(name, *sizes, config.get("bias", True) is not False, ACTIVATIONS[activation])


def _read_layer_norm(name: str, config: dict[str, Any]) -> LayerNorm:
    return LayerNorm(name, _size(name, config, "dimension"))


def _read_normalize(name: str, config: dict[str, Any]) -> Normalize:
    return Normalize()


def _size(name: str, config: dict[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or not 0 < value <= 1 << 20:
        raise UnsupportedModel(f"{name}/config.json has {field} {value!r}; must be a positive whole number")
    return value


_READERS: dict[str, Callable[[str, dict[str, Any]], Module]] = {
    "Pooling": _read_pool,
    "Dense": _read_dense,
    "LayerNorm": _read_layer_norm,
    "Normalize": _read_normalize,
}
