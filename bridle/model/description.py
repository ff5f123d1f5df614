"""Describes a model from the headers of its files: architecture, size, quantization, context, chat format, memory.

Reads GGUF metadata, or `config.json` and the headers of safetensors files. Loads no weights, and needs no torch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from bridle.errors import UnsupportedModel
from bridle.gguf.shards import GgufModel, is_first_piece, open_model

_MAX_JSON = 64 << 20
_MAX_HEADER = 128 << 20
#: llama.cpp's numbers of the file types that have no tensor type of the same name.
_FILE_TYPES = {11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M"}
#: A text that is typical for the templates of each chat format; the first match counts.
_CHAT_FORMATS = {
    "<|im_start|>": "ChatML",
    "<start_of_turn>": "Gemma",
    "<|start_header_id|>": "Llama 3",
    "<|channel|>": "Harmony",
    "[INST]": "Mistral",
    "<|end|>": "Phi",
}


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Properties of a model from its files' headers. `metadata` is the metadata of the GGUF file, or the contents of
    `config.json`. 0 and None mean unknown. `kv_values` is the number of values that one token takes in the KV cache.
    """

    format: str
    architecture: str
    num_parameters: int
    quantization: str
    context: int
    embedding_length: int
    num_bytes: int
    kv_values: int
    template: str | None
    is_embedder: bool = False
    reads_images: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def parameter_size(self) -> str:
        """Return the number of parameters in the usual short form: `134.52M`, `1.5B`."""
        count = self.num_parameters
        return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"

    @property
    def chat_format(self) -> str | None:
        """Return the name of the chat format; None for a model without a chat template."""
        if self.template is None:
            return None
        return next((name for sign, name in _CHAT_FORMATS.items() if sign in self.template), "its own template")

    @property
    def capabilities(self) -> list[str]:
        """Return the names of the model's capabilities, as in Ollama's API."""
        if self.is_embedder:
            return ["embedding"]
        text = self.template or ""
        further = {"tools": "tools" in text, "thinking": "<think>" in text, "vision": self.reads_images}
        return ["completion", *(name for name, has in further.items() if has)]

    def kv_bytes(self, num_tokens: int, value_bytes: int = 4) -> int:
        """Return the bytes of the KV cache for `num_tokens` tokens."""
        return self.kv_values * num_tokens * value_bytes


def describe(path: Path) -> ModelDescription:
    """Describe the model in a GGUF file or a folder. Raises `UnsupportedModel` if its headers are unreadable."""
    if path.is_file():
        return _of_gguf(open_model(path))
    if (path / "config.json").is_file():
        return _of_folder(path)
    files = sorted(each for each in path.glob("*.gguf") if is_first_piece(each.name))
    if len(files) != 1:
        raise UnsupportedModel(f"{path} has no config.json, and must then have 1 GGUF model; it has {len(files)}")
    return _of_gguf(open_model(files[0]))


def _of_gguf(model: GgufModel) -> ModelDescription:
    arch = model.text("general.architecture") or "unknown"
    heads = _number(model.metadata, f"{arch}.attention.head_count")
    width = _number(model.metadata, f"{arch}.embedding_length")
    listed = model.metadata.get(f"{arch}.attention.head_count_kv")
    kv_heads = _number(model.metadata, f"{arch}.attention.head_count_kv") or heads
    layers = _number(model.metadata, f"{arch}.block_count")
    all_heads = int(listed.sum()) if isinstance(listed, np.ndarray) else layers * kv_heads
    head_dim = _number(model.metadata, f"{arch}.attention.key_length") or (width // heads if heads else 0)
    return ModelDescription(
        format="gguf",
        architecture=arch,
        num_parameters=model.num_values,
        quantization=_gguf_type(model),
        context=_number(model.metadata, f"{arch}.context_length"),
        embedding_length=width,
        num_bytes=model.num_bytes,
        kv_values=2 * all_heads * head_dim,
        template=model.text("tokenizer.chat_template"),
        is_embedder=model.metadata.get(f"{arch}.attention.causal") is False,
        metadata=model.metadata,
    )


def _number(metadata: Mapping[str, Any], key: str) -> int:
    """Return an integer of the metadata, or the largest number of a list; 0 if the key is absent."""
    value = metadata.get(key, 0)
    if isinstance(value, np.ndarray):
        return int(value.max()) if value.size else 0
    return value if isinstance(value, int) else 0


def _gguf_type(model: GgufModel) -> str:
    """Return the name of the file's quantization type. If the file does not name its type, return the tensor type with
    the most bytes."""
    name = _FILE_TYPES.get(_number(model.metadata, "general.file_type"))
    if name is not None:
        return name
    sizes: Counter[str] = Counter()
    for entry in model.tensors.values():
        sizes[entry.kind.name] += entry.num_bytes
    return sizes.most_common(1)[0][0] if sizes else "unknown"


def _of_folder(folder: Path) -> ModelDescription:
    config = _read_json(folder / "config.json")
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    heads, width = _number(inner, "num_attention_heads"), _number(inner, "hidden_size")
    head_dim = _number(inner, "head_dim") or (width // heads if heads else 0)
    tensors = [each for path in sorted(folder.glob("*.safetensors")) for each in _tensors(path)]
    kinds: Counter[str] = Counter()
    for kind, shape, _ in tensors:
        kinds[kind] += prod(shape)
    return ModelDescription(
        format="safetensors",
        architecture=str(config.get("model_type", "unknown")),
        num_parameters=sum(kinds.values()),
        quantization=_quantized(config) or (kinds.most_common(1)[0][0] if kinds else "unknown"),
        context=_number(inner, "max_position_embeddings"),
        embedding_length=width,
        num_bytes=sum(size for _, _, size in tensors),
        kv_values=2 * _number(inner, "num_hidden_layers") * (_number(inner, "num_key_value_heads") or heads) * head_dim,
        template=_template(folder),
        is_embedder=(folder / "modules.json").is_file(),
        reads_images="vision_config" in config,
        metadata=config,
    )


def _tensors(path: Path) -> list[tuple[str, list[int], int]]:
    """Return type, shape and bytes of each tensor in a safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(_MAX_HEADER, path.stat().st_size):
            raise UnsupportedModel(f"{path} is not a safetensors file")
        header = _parsed(file.read(length), path)
    rows = [row for name, row in header.items() if name != "__metadata__"]
    try:
        return [(row["dtype"], row["shape"], row["data_offsets"][1] - row["data_offsets"][0]) for row in rows]
    except (KeyError, TypeError, IndexError):
        raise UnsupportedModel(f"{path} is not a safetensors file") from None


def _quantized(config: Mapping[str, Any]) -> str | None:
    settings = config.get("quantization_config")
    return str(settings.get("quant_method", "quantized")) if isinstance(settings, dict) else None


def _template(folder: Path) -> str | None:
    """Return the chat template of a folder, from `chat_template.jinja` or the tokenizer's configuration."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8", errors="replace")[:_MAX_JSON]
    path = folder / "tokenizer_config.json"
    found = _read_json(path).get("chat_template") if path.is_file() else None
    return found if isinstance(found, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MAX_JSON:
        raise UnsupportedModel(f"{path} has more than {_MAX_JSON} bytes")
    return _parsed(path.read_bytes(), path)


def _parsed(data: bytes, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UnsupportedModel(f"{path} is damaged: it has no JSON object")
    return found
