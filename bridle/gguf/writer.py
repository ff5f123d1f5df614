"""Writes a model of transformers as a GGUF file, in the layout of llama.cpp's converter.

This module decides the names, order and types of the file's tensors. The caller loads the model and passes its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bridle.distribution import install_hint
from bridle.errors import InvalidRequest, UnsupportedModel
from bridle.gguf.families import BY_MODEL_TYPE
from bridle.gguf.family import GgufFamily
from bridle.gguf.format import TYPES_BY_NAME
from bridle.gguf.forms import file_forms
from bridle.gguf.mixed_layers import divisors
from bridle.gguf.quantize import encode_blocks
from bridle.gguf.rules import TensorRule, file_name, suffix_of
from bridle.gguf.settings import write_config
from bridle.gguf.vocabulary_writer import VocabularyFields

#: For each type of a whole file: its number, the type of most tensors, the type of the most sensitive ones, and that of
#: the head.
FILE_TYPES: dict[str, tuple[int, str, str, str]] = {
    "F32": (0, "F32", "F32", "F32"),
    "F16": (1, "F16", "F16", "F16"),
    "BF16": (32, "BF16", "BF16", "BF16"),
    "Q8_0": (7, "Q8_0", "Q8_0", "Q8_0"),
    "Q4_0": (2, "Q4_0", "Q4_0", "Q6_K"),
    "Q5_0": (8, "Q5_0", "Q5_0", "Q6_K"),
    "Q4_K_S": (14, "Q4_K", "Q4_K", "Q6_K"),
    "Q4_K_M": (15, "Q4_K", "Q6_K", "Q6_K"),
    "Q5_K_S": (16, "Q5_K", "Q5_K", "Q6_K"),
    "Q5_K_M": (17, "Q5_K", "Q6_K", "Q6_K"),
    "Q6_K": (18, "Q6_K", "Q6_K", "Q6_K"),
}
#: The replacement of a type whose blocks do not divide a row.
_NARROWER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_SENSITIVE = ("attn_v", "ffn_down", "ffn_down_exps")

Progress = Callable[[float], None]


def check_type(name: str) -> None:
    """Raise `InvalidRequest` unless files can be written with the quantization type `name`."""
    if name not in FILE_TYPES:
        raise InvalidRequest(f"type is {name!r}; must be one of {', '.join(FILE_TYPES)}", "type")


def family_to_write(model_type: str) -> GgufFamily:
    """Return the GGUF family for a model type of transformers. Raises `UnsupportedModel` if models of this type cannot
    be written."""
    family = BY_MODEL_TYPE.get(model_type)
    if family is None:
        raise UnsupportedModel(
            f"model type {model_type!r} cannot be written to a GGUF file; known are {', '.join(sorted(BY_MODEL_TYPE))}"
        )
    return family


def write_gguf(
    path: Path,
    config: Any,
    tensors: Mapping[str, Tensor],
    vocabulary: VocabularyFields,
    file_type: str,
    name: str,
    progress: Progress = lambda share: None,
) -> None:
    """Write a model to the file `path`. `tensors` are its weights, by their names in transformers. The file is written
    under a temporary name, and gets the name `path` when it is complete."""
    check_type(file_type)
    try:
        from gguf import GGMLQuantizationType, GGUFWriter
    except ImportError:
        raise UnsupportedModel(f"writing GGUF files needs the extra: {install_hint('gguf')}") from None
    family = family_to_write(config.model_type)
    plan = list(_plan(family, config, tensors))
    draft = path.with_name(f".{path.name}.part")
    writer = GGUFWriter(draft, family.arch)
    try:
        writer.add_name(name)
        writer.add_file_type(FILE_TYPES[file_type][0])
        writer.add_quantization_version(2)
        write_config(config, family, lambda key, value: _put(writer, f"{family.arch}.{key}", value))
        for key, numbers in _lists(family, config, tensors).items():
            _put(writer, key, numbers)
        vocabulary.put(writer)
        kinds = [_kind(target, source, file_type, config) for target, source in plan]
        for (target, source), kind in zip(plan, kinds, strict=True):
            form, shape = TYPES_BY_NAME[kind], source.shape
            size = source.num_values // form.values * form.size
            writer.add_tensor_info(target, shape, np.dtype("f4"), size, raw_dtype=GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for at, ((_, source), kind) in enumerate(zip(plan, kinds, strict=True)):
            writer.write_tensor_data(encode_blocks(kind, source.rows()).contiguous().numpy())
            progress((at + 1) / len(plan))
        writer.close()
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _lists(family: GgufFamily, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return the model's per-layer values that the metadata stores as lists."""
    layers = range(config.num_hidden_layers)
    rules = [rule for rule in family.rules if rule.change == "listed"]
    return {rule.file[0]: [float(tensors[rule.model.format(layer)]) for layer in layers] for rule in rules}


def _put(writer: Any, key: str, value: Any) -> None:
    """Add a metadata value with the type that llama.cpp's converter uses."""
    put = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    (writer.add_array if isinstance(value, list) else put[type(value)])(key, value)


# -- which tensors -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of the file. The values are computed from a tensor of the model when the file is written."""

    tensor: Tensor
    rule: TensorRule
    suffix: str = ".weight"
    config: Any = None
    part: int = 0  # index among the parts that the model's tensor is split into

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._form(self.tensor.detach().to("meta")).shape)

    @property
    def num_values(self) -> int:
        return prod(self.shape)

    def rows(self) -> Tensor:
        """Return the tensor as float32 [rows, values]."""
        return self._form(self.tensor.detach()).float().reshape(-1, self.shape[-1]).contiguous()

    def _form(self, tensor: Tensor) -> Tensor:
        return file_forms(self.rule, tensor, self.suffix, self.config)[self.part]


def _plan(family: GgufFamily, config: Any, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, _Source]]:
    """Yield the file's tensors in order. Raises `UnsupportedModel` for a tensor of the model that a file cannot
    store."""
    left = dict.fromkeys(tensors)
    if config.tie_word_embeddings:
        left.pop("lm_head.weight", None)
    for name, tensor in _rotation_tensors(config):
        yield name, _Source(tensor, TensorRule("", ("",)))
    layers = range(config.num_hidden_layers)
    for rule in family.rules:
        for layer in layers if "{}" in rule.model else range(1):
            for suffix in (".weight", ".bias", ""):
                name = rule.model.format(layer) + suffix
                if name in left:
                    del left[name]
                    if rule.change == "listed":
                        continue
                    if rule.change == "slice":
                        yield from _stacked(rule, tensors)
                        continue
                    for part, file in enumerate(rule.file):
                        source = _Source(tensors[name], rule, suffix_of(name), config, part)
                        yield file_name(file, layer, suffix_of(name)), source
    if left:
        raise UnsupportedModel(f"weight {next(iter(left))!r} has no tensor name in GGUF files of {family.arch}")


def _stacked(rule: TensorRule, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, _Source]]:
    """Yield the matrices that a file stores stacked in one tensor, when the caller reaches the first matrix."""
    stem, _, number = rule.model.rpartition(".")
    if number == "0":
        found = [tensor for name, tensor in tensors.items() if name.startswith(f"{stem}.")]
        yield rule.file[0] + ".weight", _Source(torch.stack(found), TensorRule("", rule.file))


def _rotation_tensors(config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors for scaled rotary positions. Llama 3's scaling is stored as a divisor for each frequency, and
    so are Phi-3's factors."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    if rope.get("full_attention", {}).get("rope_type") == "proportional":
        yield "rope_freqs.weight", torch.tensor(divisors(config))
    if kind == "longrope":
        for length in ("long", "short"):
            yield f"rope_factors_{length}.weight", torch.tensor(config.rope_parameters[f"{length}_factor"])
    if kind != "llama3":
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))  # [D / 2]
    steps = torch.arange(0, 2 * len(scaled), 2, dtype=torch.float32) / (2 * len(scaled))
    yield "rope_freqs.weight", (1.0 / float(config.rope_parameters["rope_theta"]) ** steps) / scaled.float()


# -- which types --------------------------------------------------------------------------------------------------


def _kind(name: str, source: _Source, file_type: str, config: Any) -> str:
    """Return the type of one tensor of the file. Norms, biases, convolutions and routers are not quantized, because
    llama.cpp computes them only in floats."""
    _, usual, careful, head = FILE_TYPES[file_type]
    is_float = any(part in name for part in ("ffn_gate_inp", "conv", "norm", "hc_")) or not name.endswith(".weight")
    if len(source.shape) < 2 or is_float:
        return "F32"
    kind = usual
    if name == "output.weight" or (name == "token_embd.weight" and config.tie_word_embeddings):
        kind = head
    elif any(f".{part}." in name for part in _SENSITIVE) and _is_sensitive(name, config.num_hidden_layers):
        kind = careful
    while source.shape[-1] % TYPES_BY_NAME[kind].values:
        kind = _NARROWER.get(kind, "F16")
    return kind


def _is_sensitive(name: str, num_layers: int) -> bool:
    """Return whether a tensor's layer gets more bits. Layers with more bits are the first and last eighth, and every
    third layer in between."""
    layer = int(name.split(".")[1])
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
