"""Inspects the files, sizes and headers of a model folder before anything is loaded. Does not import torch. A
checkpoint is config.json plus safetensors files. Damage is detected from the files' headers alone, so that a user gets
one error message instead of a crash minutes later. Pickles and code in a checkpoint are never run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from bridle.errors import UnsupportedModel
from bridle.gguf.format import FLOATS
from bridle.gguf.pointer import tower_of, weights_of
from bridle.gguf.reader import TensorEntry
from bridle.gguf.shards import GgufModel, open_model

#: Bytes per number of the types that safetensors knows.
ITEM_SIZES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
MAX_HEADER = 100_000_000
MAX_JSON = 64_000_000
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder that passed inspection. `num_values` is the number of weight values, and `num_bytes` their size on disk.
    `gguf` is the GGUF file with the weights, if there is one, and `tower` the GGUF file of its vision tower. For
    safetensors files, `tensor_bytes` has the size of each tensor."""

    folder: Path
    config: dict[str, Any]
    eos_token_ids: tuple[int, ...]
    num_values: int
    num_bytes: int
    gguf: GgufModel | None = None
    tower: GgufModel | None = None
    tensor_bytes: dict[str, int] = field(default_factory=dict, repr=False)

    def weight_bytes(self, item_size: int, keeps_blocks: bool, keeps_codes: bool = False) -> int:
        """Return the bytes that the weights take in memory, if a floating-point value takes `item_size` bytes. With
        `keeps_blocks`, quantized weights stay in blocks that the CPU kernels read. With `keeps_codes`, quantized
        weights keep their number of bits."""
        if "quantization_config" in self.config:  # some 4-bit weights are kept in 8 bits with scales, or as floats
            if keeps_codes:
                return self.num_bytes * 5 // 4
            return self.num_bytes * 9 // 4 if keeps_blocks else self.num_bytes * 2 * item_size
        if self.gguf is None or not keeps_blocks:
            return self.num_values * item_size
        eyes = 0 if self.tower is None else self.tower.num_values * item_size
        return eyes + sum(_bytes_in_memory(entry, item_size) for entry in self.gguf.tensors.values())


def _bytes_in_memory(entry: TensorEntry, item_size: int) -> int:
    """Return the bytes that a tensor of a GGUF file takes in memory. Tensors without quantization become floats.
    Quantized tensors keep their blocks if kernels support them, and are converted to 8 bits otherwise."""
    from bridle.cpu_kernels.ggml import TYPES  # which imports torch

    if entry.kind.name in FLOATS:
        return entry.num_values * item_size
    return entry.num_bytes if entry.kind.name in TYPES else TYPES["Q8_0"].row_bytes(entry.num_values)


def inspect_checkpoint(folder: Path) -> Checkpoint:
    """Check the files of a model folder. Raises `UnsupportedModel`, which names the missing or damaged part."""
    config = read_json(folder / "config.json", required=True)
    if "auto_map" in config and not config.get("model_type"):
        raise UnsupportedModel(f"{folder}: the model needs its own Python code, which bridle never runs")
    if (file := weights_of(folder)) is not None:
        model, eye = open_model(file), tower_of(folder)
        tower = None if eye is None else open_model(eye)
        values, size = (model.num_values, model.num_bytes)
        if tower is not None:
            values, size = values + tower.num_values, size + tower.num_bytes
        return Checkpoint(folder, config, _eos_token_ids(folder, config), values, size, model, tower)
    tensors: dict[str, Path] = {}
    sizes: dict[str, int] = {}
    num_values = 0
    for path in weight_files(folder):
        for name, (values, size) in _read_header(path).items():
            tensors[name], sizes[name] = path, size
            num_values += values
    _check_index(folder, tensors)
    if not tensors:
        raise UnsupportedModel(f"{folder}: the weight files hold no tensors")
    ends, num_bytes = _eos_token_ids(folder, config), sum(sizes.values())
    return Checkpoint(folder, config, ends, num_values, num_bytes, tensor_bytes=sizes)


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
    """Return the JSON object in the file `path` of a model folder; {} if the file is absent and not `required`."""
    if not path.is_file():
        if required:
            raise UnsupportedModel(f"{path.parent} has no {path.name}; it is not a Hugging Face model folder")
        return {}
    if path.stat().st_size > MAX_JSON:
        raise UnsupportedModel(f"{path} has {path.stat().st_size} bytes; at most {MAX_JSON} are read")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder. Raises `UnsupportedModel` if files are missing, or weights have
    another format."""
    index = read_json(folder / INDEX_NAME)
    if index:
        names = sorted({str(name) for name in _weight_map(folder, index).values()})
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise UnsupportedModel(f"{folder / INDEX_NAME} names a file outside of the folder: {outside[0]!r}")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UnsupportedModel(f"{folder} lacks {len(missing)} of {len(names)} weight files, such as {missing[0]}")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    raise UnsupportedModel(_why_no_weights(folder))


def _why_no_weights(folder: Path) -> str:
    for pattern, what in (("*.bin", "pickled"), ("*.pt", "pickled"), ("*.pth", "pickled"), ("*.gguf", "GGUF")):
        found = sorted(path.name for path in folder.glob(pattern))
        if found:
            advice = "convert them to safetensors" if what == "pickled" else "use the original safetensors"
            return f"{folder} holds only {what} weights ({found[0]}), which bridle does not load; {advice}"
    if (folder / "adapter_config.json").is_file():
        return f"{folder} holds an adapter, not a model; load the model it was made for"
    return f"{folder} has no weights: neither model.safetensors nor {INDEX_NAME}"


def _weight_map(folder: Path, index: dict[str, Any]) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnsupportedModel(f"{folder / INDEX_NAME} has no weight_map")
    return weight_map


def _check_index(folder: Path, tensors: dict[str, Path]) -> None:
    index = read_json(folder / INDEX_NAME)
    if not index:
        return
    for name, file in _weight_map(folder, index).items():
        if name not in tensors:
            raise UnsupportedModel(f"{folder / file} lacks tensor {name!r}, which {INDEX_NAME} says it holds")


def _read_header(path: Path) -> dict[str, tuple[int, int]]:
    """Return (number of values, bytes) for each tensor by name. Raises `UnsupportedModel` if the header does not match
    the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
            raise UnsupportedModel(f"{path} is not a safetensors file, or is cut off ({size} bytes)")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise UnsupportedModel(f"{path} has a damaged header: {error}") from error
    if not isinstance(header, dict):
        raise UnsupportedModel(f"{path} has a damaged header: not a JSON object")
    header.pop("__metadata__", None)
    return {name: _measure(path, name, entry, size - 8 - length) for name, entry in header.items()}


def _measure(path: Path, name: str, entry: Any, payload: int) -> tuple[int, int]:
    try:
        begin, end = entry["data_offsets"]
        values = prod(int(side) for side in entry["shape"])
        item = ITEM_SIZES.get(entry["dtype"])
    except (TypeError, KeyError, ValueError) as error:
        raise UnsupportedModel(f"{path} has a damaged header: tensor {name!r} has a wrong entry") from error
    if not 0 <= begin <= end <= payload:
        raise UnsupportedModel(
            f"{path} is cut off: tensor {name!r} ends at byte {end} of the data, which has {payload}"
        )
    if item is not None and values * item != end - begin:
        raise UnsupportedModel(f"{path} is damaged: tensor {name!r} has {end - begin} bytes, not {values * item}")
    return values, end - begin


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Return the end-of-sequence ids of config.json and generation_config.json, in order, without repeats."""
    ids: dict[int, None] = {}
    for source in (config, read_json(folder / "generation_config.json")):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
                ids[token] = None
    return tuple(ids)
