"""Converts a LoRA adapter in a GGUF file to a folder in PEFT's format, so that code that reads PEFT folders can read
it.

The file uses llama.cpp's tensor names and llama.cpp's order of query and key rows. The file lacks the number of heads,
so the model's configuration is needed to restore the order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from bridle.errors import AdapterRefused, UnsupportedModel
from bridle.gguf.dequantize import decode_blocks
from bridle.gguf.families import BY_MODEL_TYPE
from bridle.gguf.family import GgufFamily
from bridle.gguf.folder import write_folder
from bridle.gguf.pointer import cache_folder
from bridle.gguf.reader import open_gguf
from bridle.gguf.rows import library_order
from bridle.gguf.rules import Order, TensorRule
from bridle.gguf.shards import GgufModel
from bridle.safe_repr import short_repr

_A, _B = ".weight.lora_a", ".weight.lora_b"
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def unpack_adapter(path: Path, config: Mapping[str, Any]) -> Path:
    """Convert the adapter in the file `path` to a folder, and return the folder's path. `config` are the fields of the
    model's `config.json`. Raises `AdapterRefused` with the reason."""
    path = path.expanduser().resolve()
    try:
        model = GgufModel([open_gguf(path)])
        family = _check_kind(model, config)
        digest = hashlib.blake2b(str((path, path.stat().st_mtime_ns, sorted(config.items(), key=str))).encode())
        digest.update(model.files[0].header)
        folder = cache_folder().with_name("gguf-adapters") / f"{path.stem[:60]}-{digest.hexdigest()[:24]}"
        if not (folder / _CONFIG).is_file():
            write_folder(folder, _files(model, family, config), _CONFIG)
    except UnsupportedModel as error:
        raise AdapterRefused(str(error), "source") from None
    return folder


def _check_kind(model: GgufModel, config: Mapping[str, Any]) -> GgufFamily:
    kinds = model.text("general.type"), model.text("adapter.type")
    if kinds != ("adapter", "lora"):
        raise AdapterRefused(
            f"{model.path} is not a LoRA adapter: it has the types {short_repr(kinds[0])} and {short_repr(kinds[1])}",
            "source",
        )
    family = BY_MODEL_TYPE.get(str(config.get("model_type")))
    arch = model.text("general.architecture")
    if family is None or family.arch != arch:
        raise AdapterRefused(
            f"{model.path} is an adapter for the architecture {short_repr(arch)}; "
            f"the model is of type {short_repr(config.get('model_type'))}",
            "source",
        )
    return family


def _files(model: GgufModel, family: GgufFamily, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the contents of the two PEFT files, by file name."""
    alpha = model.real("adapter.lora.alpha", 0.0)
    weights: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for layer, a, b in _pairs(model, family, config):
        weights[f"base_model.model.{layer}.lora_A.weight"] = a
        weights[f"base_model.model.{layer}.lora_B.weight"] = b
        ranks[layer] = a.shape[0]
    if not weights:
        raise AdapterRefused(f"{model.path} holds no tensors", "source")
    rank = max(ranks.values())
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha or rank,
        "target_modules": sorted({layer.rpartition(".")[2] for layer in ranks}),
        "rank_pattern": {layer: own for layer, own in ranks.items() if own != rank},
        # Without an alpha, llama.cpp adds the product of the tensors unscaled, for any rank.
        "alpha_pattern": {} if alpha else {layer: own for layer, own in ranks.items() if own != rank},
    }
    return {_CONFIG: json.dumps(settings).encode(), _WEIGHTS: save(weights, metadata={"format": "pt"})}


def _pairs(model: GgufModel, family: GgufFamily, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each layer with its A [rank, in] and B [out, rank]. Rows are in the order of transformers."""
    places = dict(places_of(family, config))
    for name in model.tensors:
        stem = name.removesuffix(_A).removesuffix(_B)
        if stem == name or stem not in places or {stem + _A, stem + _B} - model.tensors.keys():
            raise AdapterRefused(f"{model.path}: tensor {short_repr(name)} is not A or B of a known layer", "source")
        if name.endswith(_B):
            continue
        layer, rule = places[stem]
        a, b = _numbers(model, stem + _A), _numbers(model, stem + _B)
        try:
            if b.shape[1] != a.shape[0]:
                raise ValueError("the ranks of A and B differ")
            yield layer, _ordered(a, rule.columns, 1, config), _ordered(b, rule.order, 0, config)
        except ValueError:
            raise AdapterRefused(
                f"{model.path}: the A and B tensors of {short_repr(stem)} have shapes that do not match", "source"
            ) from None


def _ordered(matrix: Tensor, order: Order, dim: int, config: Mapping[str, Any]) -> Tensor:
    rows = library_order(order, matrix.shape[dim], SimpleNamespace(**config))
    return matrix if rows is None else matrix.index_select(dim, rows)


def places_of(family: GgufFamily, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, TensorRule]]]:
    """Yield for each layer its name in the file, its name in transformers, and the rule that converts its tensor."""
    num_layers = int(config.get("num_hidden_layers") or len(config.get("layers_block_type") or ()))
    for rule in family.rules:
        if "{}" in rule.model and len(rule.file) == 1 and "norm" not in rule.model:
            for layer in range(num_layers):
                yield rule.file[0].format(layer), (rule.model.format(layer), rule)


def _numbers(model: GgufModel, name: str) -> Tensor:
    entry = model.tensors[name]
    if len(entry.shape) != 2:
        raise AdapterRefused(
            f"{model.path}: tensor {short_repr(name)} has shape {entry.shape}; it must be a matrix", "source"
        )
    return decode_blocks(entry.kind.name, torch.from_numpy(model.read(name)))
