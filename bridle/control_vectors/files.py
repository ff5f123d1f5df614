"""Reads and writes files of control vectors: llama.cpp's GGUF files, and safetensors files with the same tensor names.

A tensor `direction.N` is added to the output of layer N, counted from 0. Layer 0 never has a direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from bridle.distribution import install_hint
from bridle.errors import InvalidRequest, UnsupportedModel
from bridle.gguf.dequantize import decode_blocks
from bridle.gguf.reader import open_gguf
from bridle.safe_repr import short_repr

MAX_FILE_BYTES = 256 << 20
_PREFIX = "direction."
_ARCH = "controlvector"

#: Directions by the number of the layer after which each is added, float32 [hidden].
Directions = Mapping[int, Tensor]


def read_vector(path: Path) -> dict[int, Tensor]:
    """Read the directions in a file, by layer number. Raises `InvalidRequest` if the file cannot be used."""
    if not path.is_file():
        raise InvalidRequest(f"control vector: got {path}; it must be a GGUF or safetensors file", "source")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise InvalidRequest(
            f"control vector: got {path} of {path.stat().st_size} bytes; at most {MAX_FILE_BYTES}", "source"
        )
    found: dict[int, Tensor] = {}
    try:
        for name, values in _gguf(path) if path.suffix.lower() == ".gguf" else _safetensors(path):
            found[_layer_of(name, path)] = values.float()
    except UnsupportedModel as error:
        raise InvalidRequest(f"control vector: {error}", "source") from None
    _check(found, path)
    return dict(sorted(found.items()))


def _gguf(path: Path) -> Iterator[tuple[str, Tensor]]:
    file = open_gguf(path)
    for name, entry in file.tensors.items():
        if len(entry.shape) != 1:
            raise UnsupportedModel(f"{path}: tensor {short_repr(name)} has shape {entry.shape}; it must be one row")
        yield name, decode_blocks(entry.kind.name, torch.from_numpy(file.read(name)))[0]


def _safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(path.read_bytes())
    except SafetensorError as error:
        raise UnsupportedModel(f"{path} is neither a GGUF nor a safetensors file: {error}") from None
    yield from tensors.items()


def _layer_of(name: str, path: Path) -> int:
    number = name.removeprefix(_PREFIX)
    if number == name or not (number.isascii() and number.isdigit() and 0 < int(number[:9]) < 10_000):
        raise InvalidRequest(
            f"control vector: {path} has tensor {short_repr(name)}; names must be {_PREFIX}N, for a layer N from 1",
            "source",
        )
    return int(number)


def _check(found: Directions, path: Path) -> None:
    """Raise `InvalidRequest` unless all directions are one-dimensional, of the same length, and finite."""
    sizes = {tuple(values.shape) for values in found.values()}
    if len(sizes) != 1 or len(next(iter(sizes))) != 1:
        raise InvalidRequest(
            f"control vector: {path} has directions of shapes {sorted(sizes)}; all must be rows of the same length",
            "source",
        )
    for layer, values in found.items():
        if not bool(values.isfinite().all()):
            raise InvalidRequest(f"control vector: {_PREFIX}{layer} of {path} has values that are not finite", "source")


def write_vector(path: Path, directions: Directions, model: str) -> None:
    """Write a GGUF file that llama.cpp also reads. `model` is the architecture of the model that the directions are
    for. Raises `UnsupportedModel` if the Python package `gguf` is not installed."""
    try:
        from gguf import GGUFWriter
    except ImportError:
        raise UnsupportedModel(f"writing GGUF files needs the extra: {install_hint('gguf')}") from None
    writer = GGUFWriter(path, _ARCH)
    writer.add_string(f"{_ARCH}.model_hint", model)
    writer.add_uint32(f"{_ARCH}.layer_count", max(directions))
    for layer, values in sorted(directions.items()):
        writer.add_tensor(f"{_PREFIX}{layer}", values.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
