"""Caches dense models on disk in the form in which a CPU computes them. Loading a cached model does not unpack, check
or rearrange its weights, and does not import transformers. An entry is valid for the same checkpoint files (path, size,
modification time), options, kernels, and versions of the programs that wrote it. An entry is written only if the model
restored from it gives the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from bridle.config import ModelConfig, Quantization
from bridle.cpu_kernels.huge_pages import alloc_huge_pages
from bridle.cpu_kernels.isa_targets import MANIFEST
from bridle.cpu_kernels.library import kernels
from bridle.errors import InternalError
from bridle.file_cache import Bytes, FileCache
from bridle.gguf.pointer import weights_of
from bridle.gguf.shards import pieces_of
from bridle.model import memory, tensor_parallel
from bridle.model.checkpoint import Checkpoint
from bridle.model.dense_layer import are_lean, attend_causally, table_names
from bridle.model.dense_model import DenseModel
from bridle.model.forward_context import attention_handler
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.loaded_weights import LoadedWeights, weight_bytes
from bridle.model.restored import CannotDescribe, Describer, ModelPart, RestoredModel

_log = logging.getLogger(__name__)

#: The version of the contents of entries, and of the checks and the order of weights. After a change of it, all entries
#: are made again.
_EDITION = 1
#: Models with fewer bytes of weights are not cached, because their checkpoints load as quickly.
LEAST_BYTES = 32 << 20
_ALIGNMENT = 64
_DTYPES = {"uint8": torch.uint8, "float32": torch.float32, "int8": torch.int8}
#: The files of a folder that describe its model, in addition to those with weights.
_DESCRIPTIONS = ("config.json", "generation_config.json", "gguf.json")


class TensorPlace(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    begin: int


class Description(msgspec.Struct, frozen=True):
    """The contents of a cache entry's JSON file."""

    key: str
    model: ModelPart
    tensors: tuple[TensorPlace, ...]
    geometry: dict[str, dict[str, Any]]
    vocab_size: int
    max_model_len: int
    quantization: Quantization
    eos_token_ids: tuple[int, ...]
    num_values: int
    num_bytes: int
    weight_bytes: int  # estimated from the files


@dataclass(frozen=True, slots=True)
class _Place:
    files: FileCache
    path: Path
    key: str


def find_description(config: ModelConfig, folder: Path) -> Description | None:
    """Return the cache entry's description for the model in `config`; None if the model has to be loaded from its
    checkpoint."""
    place = _place(config, folder)
    return None if place is None else _describe(place, place.files.read_text(place.path))


def load_kept(config: ModelConfig, folder: Path) -> LoadedWeights | None:
    """Return the cached model for `config`; None if the model is not cached, or its entry is unusable."""
    place, found = _place(config, folder), kernels()
    told = None if place is None else _describe(place, place.files.read_text(place.path))
    if place is None or found is None or told is None:
        return None
    memory.check_weights_fit(told.weight_bytes, torch.float32.itemsize, torch.device("cpu"))
    read = place.files.read(place.path, _allocate)
    described = None if read is None else _describe(place, read[0])
    if read is None or described is None:
        return None
    try:
        model = RestoredModel(described.model, _tensors(described, read[1]), found)
        geometry = Geometry(
            {int(layer): LayerGeometry(**shape) for layer, shape in described.geometry.items()}, described.vocab_size
        )
    except (InternalError, LookupError, TypeError, ValueError) as error:  # an entry with other contents
        _log.warning("the cached model %s cannot be used: %s", place.path, error)
        return None
    model.requires_grad_(False).eval()
    checkpoint = Checkpoint(folder, {}, described.eos_token_ids, described.num_values, described.num_bytes)
    config = replace(config, quantization=described.quantization)
    length, cpu = described.max_model_len, torch.device("cpu")
    return LoadedWeights(config, checkpoint, model, geometry, torch.float32, cpu, length, place.key)


def keep(config: ModelConfig, loaded: LoadedWeights) -> bool:
    """Write a cache entry for the model that was loaded from its checkpoint for `config`, if this model can be cached.
    Return whether the model was cached."""
    place, found = _place(config, loaded.checkpoint.folder), kernels()
    model: Any = loaded.model
    is_small = loaded.checkpoint.num_bytes < LEAST_BYTES
    if place is None or found is None or is_small or loaded.dtype is not torch.float32 or not are_lean(model):
        return False
    describer = Describer()
    try:
        part = describer.model(model, table_names(model))
    except (CannotDescribe, AttributeError) as error:
        _log.info("%s is not cached in the kernels' layout: %s", loaded.config.model, error)
        return False
    if not restores_exactly(model, RestoredModel(part, describer.tensors, found), loaded.max_model_len):
        _log.warning("%s is not cached in the kernels' layout: restored weights differ", loaded.config.model)
        return False
    places, parts = _lay_out(describer.tensors)
    text = Description(
        key=place.key,
        model=part,
        tensors=places,
        geometry={str(layer): msgspec.to_builtins(shape) for layer, shape in loaded.geometry.layers.items()},
        vocab_size=loaded.geometry.vocab_size,
        max_model_len=loaded.max_model_len,
        quantization=loaded.config.quantization,
        eos_token_ids=loaded.checkpoint.eos_token_ids,
        num_values=loaded.checkpoint.num_values,
        num_bytes=loaded.checkpoint.num_bytes,
        weight_bytes=weight_bytes(loaded.checkpoint, loaded.dtype, loaded.device),
    )
    return place.files.write(place.path, msgspec.json.encode(text), parts)


def key_of(config: ModelConfig, folder: Path) -> str | None:
    """Return the key of a model's cache entry; None for a model that cannot be cached. The key is a text with all data
    that the entry depends on."""
    found = kernels()
    is_asked = config.dtype in ("auto", "float32") and config.device in ("auto", "cpu") and config.backend != "llamacpp"
    if found is None or not is_asked or tensor_parallel.num_ranks() > 1:
        return None
    if config.device == "auto" and torch.cuda.is_available():
        return None
    files = _files(folder)
    if files is None:
        return None
    parts = {
        "edition": _EDITION,
        "files": files,
        "quantization": config.quantization,
        "max_model_len": config.max_model_len,
        "kernels": [found.name, _manifest().get(found.name, "")],
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    return msgspec.json.encode(parts, order="sorted").decode()


# -- parts -------------------------------------------------------------------------------------------------------


def _place(config: ModelConfig, folder: Path) -> _Place | None:
    key = key_of(config, folder)
    if key is None:
        return None
    files = FileCache("models")
    return _Place(files, files.path(folder.name, key.encode()), key)


def _files(folder: Path) -> list[tuple[str, int, int]] | None:
    """Return the files of a checkpoint with their sizes and modification times in nanoseconds; None if the checkpoint
    has no files."""
    gguf = weights_of(folder)
    try:
        weights = sorted(folder.glob("*.safetensors")) if gguf is None else pieces_of(gguf)
        paths = [*weights, *(path for name in _DESCRIPTIONS if (path := folder / name).is_file())]
        states = [(path, path.stat()) for path in paths]
    except OSError:
        return None
    return [(str(path.resolve()), state.st_size, state.st_mtime_ns) for path, state in states] if weights else None


@cache
def _manifest() -> dict[str, str]:
    return msgspec.json.decode(MANIFEST.read_bytes(), type=dict[str, str])


def _describe(place: _Place, text: bytes | None) -> Description | None:
    """Return the description in an entry, if the entry belongs to this model."""
    if text is None:
        return None
    try:
        found = msgspec.json.decode(text, type=Description)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    return found if found.key == place.key else None


def _allocate(size: int) -> Bytes:
    """Return `size` bytes of memory in huge pages. If the file were mapped into memory instead, computing a token would
    take a sixth longer."""
    data: Bytes = alloc_huge_pages(size).numpy()
    return data


def _tensors(described: Description, data: Bytes) -> list[Tensor]:
    whole, made = torch.from_numpy(data), []
    for place in described.tensors:
        dtype = _DTYPES[place.dtype]
        size = prod(place.shape) * dtype.itemsize
        if place.begin < 0 or place.begin % _ALIGNMENT or place.begin + size > whole.numel():
            raise ValueError(f"a tensor of {size} bytes begins at byte {place.begin} of {whole.numel()}")
        made.append(whole[place.begin : place.begin + size].view(dtype).view(place.shape))
    return made


def _lay_out(tensors: Sequence[Tensor]) -> tuple[tuple[TensorPlace, ...], list[Bytes]]:
    """Return the position of each tensor in the file, and the file's contents in pieces. Gaps let each tensor begin at
    a cache line."""
    places, parts, at = [], [], 0
    for tensor in tensors:
        name = str(tensor.dtype).removeprefix("torch.")
        places.append(TensorPlace(name, tuple(tensor.shape), at))
        flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        gap = np.zeros(-flat.nbytes % _ALIGNMENT, np.uint8)
        parts += [flat, gap]
        at += flat.nbytes + gap.nbytes
    return tuple(places), parts


@torch.inference_mode()
def restores_exactly(model: Any, restored: RestoredModel, max_model_len: int) -> bool:
    """Return whether the original and the restored model give bitwise equal logits for a few tokens, and equal rotary
    angles for all positions."""
    first, second = DenseModel(model), DenseModel(restored)
    positions = torch.linspace(0, max_model_len - 1, min(max_model_len, 4096)).long().unsqueeze(0)
    turns = [short.rotations(positions) for short in (first, second)]
    if not all(torch.equal(a, b) for pair in zip(*turns, strict=True) for a, b in zip(*pair, strict=True)):
        return False
    ids = torch.arange(3).unsqueeze(0)
    with attention_handler(attend_causally):
        ways = [short(ids, ids, ids[0], attend_causally) for short in (first, second)]
    return torch.equal(*ways)
