"""Reads the header of an adapter's safetensors file: the names, shapes and offsets of its tensors, and the layers that
they change. Does not import torch. Every tensor must be the A or B matrix of a layer, with the configured rank. An
adapter with any other tensor is refused, because bridle would not apply this tensor's trained weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from bridle.errors import AdapterRefused
from bridle.lora.peft_config import LoraShape, PeftConfig

#: Bytes per value of the types that an adapter may have.
ITEM_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 100_000
MAX_SIDE = 1 << 24
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_MAX_SHOWN_CHARS = 120

#: The meaning of a tensor that is not plain LoRA, by a part of its name.
_REASONS = (
    ("lora_magnitude_vector", "DoRA scales the base weights too"),
    ("lora_embedding_", "LoRA on embeddings is not supported"),
    ("modules_to_save", "it replaces a whole layer of the model"),
    ("token_adapter", "it has trained embeddings"),
    ("embed_tokens", "it has trained embeddings"),
    ("lm_head", "it has a trained head"),
    (".bias", "it has biases"),
)


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """One tensor of the file: its type, its shape, and the range of its bytes after the header."""

    dtype: str
    shape: tuple[int, int]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


#: Tensors by name.
Header = Mapping[str, SafetensorsEntry]


class _RawEntry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_header(data: bytes, num_bytes: int) -> Header:
    """Return the tensors of a safetensors file of `num_bytes` bytes. `data` is the whole file, or its beginning up to
    the maximum size of a header. Raises `AdapterRefused` if the file is damaged."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise AdapterRefused(f"the weights are no safetensors file, or are cut off ({num_bytes} bytes)", "source")
    try:
        raw: Any = msgspec.json.decode(data[8 : 8 + length])
        if not isinstance(raw, dict):
            raise AdapterRefused("the adapter's weights have a damaged header: it is not a JSON object", "source")
        raw.pop("__metadata__", None)
        entries = msgspec.convert(raw, dict[str, _RawEntry])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise AdapterRefused(f"the adapter's weights have a damaged header: {error}", "source") from None
    if not 1 <= len(entries) <= MAX_TENSORS:
        raise AdapterRefused(f"the adapter's weights hold {len(entries)} tensors; must be 1 to {MAX_TENSORS}", "source")
    size = num_bytes - 8 - length
    header = {name: _check_entry(name, entry, size) for name, entry in entries.items()}
    _check_overlap(header, size)
    return header


def _check_entry(name: str, entry: _RawEntry, size: int) -> SafetensorsEntry:
    begin, end = entry.data_offsets
    if entry.dtype not in ITEM_SIZES:
        raise AdapterRefused(
            f"tensor {_show(name)} is of type {_show(entry.dtype)}; must be one of {', '.join(ITEM_SIZES)}", "source"
        )
    if len(entry.shape) != 2 or not all(1 <= side <= MAX_SIDE for side in entry.shape):
        raise AdapterRefused(f"tensor {_show(name)} has shape {entry.shape[:8]}; {_why(name)}", "source")
    rows, columns = entry.shape
    if not 0 <= begin <= end <= size:
        raise AdapterRefused(f"the weights are cut off: tensor {_show(name)} ends at {end} of {size} bytes", "source")
    if rows * columns * ITEM_SIZES[entry.dtype] != end - begin:
        raise AdapterRefused(f"tensor {_show(name)} of shape {entry.shape} cannot have {end - begin} bytes", "source")
    return SafetensorsEntry(entry.dtype, (rows, columns), begin, end)


def _check_overlap(header: Header, size: int) -> None:
    """Raise `AdapterRefused` if a byte of the file's data belongs to no tensor, or to two tensors. The safetensors
    format forbids gaps and overlaps."""
    position = 0
    for entry in sorted(header.values(), key=lambda entry: entry.begin):
        if entry.begin != position:
            raise AdapterRefused(f"the weights are damaged: byte {position} belongs to no tensor or to two", "source")
        position = entry.end
    if position != size:
        raise AdapterRefused(f"the weights have {size - position} bytes that belong to no tensor", "source")


@lru_cache(maxsize=64)
def shared_shapes(shapes: tuple[tuple[str, LoraShape], ...]) -> Mapping[str, LoraShape]:
    """Return the mapping that all adapters with equal `shapes` share. Sharing saves memory, because thousands of
    adapters may be known."""
    return dict(shapes)


def shapes_of(header: Header, config: PeftConfig) -> Mapping[str, LoraShape]:
    """Return the adapter's shape at each layer, in the order of the layers' names. Raises `AdapterRefused`."""
    shapes = {}
    for name in sorted(header):
        module = module_of(name)
        if not name.endswith(_A):
            continue
        first, second = header[name], header.get(f"{_PREFIX}{module}{_B}")
        if second is None:
            raise AdapterRefused(f"layer {_show(module)} of the adapter has lora_A, but no lora_B", "source")
        rank = config.rank_of(module)
        if first.shape[0] != rank or second.shape[1] != rank:
            raise AdapterRefused(
                f"layer {_show(module)} has lora_A of {first.shape} and lora_B of {second.shape}, but rank {rank}",
                "source",
            )
        shapes[module] = LoraShape(rank, first.shape[1], second.shape[0], config.scale_of(module))
    if 2 * len(shapes) != len(header):
        raise AdapterRefused("a layer of the adapter has lora_B, but no lora_A", "source")
    return shared_shapes(tuple(shapes.items()))


def names_of(module: str) -> tuple[str, str]:
    """Return the names of the A and B tensors of a layer."""
    return f"{_PREFIX}{module}{_A}", f"{_PREFIX}{module}{_B}"


def module_of(name: str) -> str:
    """Return the layer that a tensor belongs to. Raises `AdapterRefused` if the tensor is not a LoRA matrix of a
    layer."""
    for suffix in (_A, _B):
        if name.startswith(_PREFIX) and name.endswith(suffix):
            return name[len(_PREFIX) : -len(suffix)]
    raise AdapterRefused(f"tensor {_show(name)} is not supported: {_why(name)}", "source")


def _why(name: str) -> str:
    for part, reason in _REASONS:
        if part in name:
            return reason
    return "only pairs of matrices named lora_A.weight and lora_B.weight are"


def _show(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "...")
