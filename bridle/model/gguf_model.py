"""Reads the weights of a GGUF file into the model class of transformers. Quantized matrices stay quantized. The model
is made without memory, then each parameter gets its tensor. Quantized matrices become `QuantizedLinear`, and quantized
experts `PackedExperts`. A quantized embedding decodes only the rows that are looked up. Tensors of other kinds become
floats. Every parameter must get a tensor, and every tensor must be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from bridle.cpu_kernels.ggml import TYPES
from bridle.cpu_kernels.linear import QuantizedLinear, prepare_side_by_side
from bridle.errors import UnsupportedModel
from bridle.gguf import GgufModel
from bridle.gguf.dequantize import decode_blocks
from bridle.gguf.families import ROTATION_TENSORS
from bridle.gguf.family import GgufFamily
from bridle.gguf.format import FLOATS
from bridle.gguf.forms import library_form
from bridle.gguf.mixed_layers import unread_tensors
from bridle.gguf.moe import draft_tensors
from bridle.gguf.rope import read_line
from bridle.gguf.rows import library_order
from bridle.gguf.rules import EMBEDDING, Order, TensorRule, file_name, suffix_of
from bridle.gguf.settings import find_family
from bridle.model import attention
from bridle.model.buffers import fill_buffers
from bridle.model.embedding import QuantizedEmbedding
from bridle.model.gguf_matrix import ReorderedInputs, packed_matrix
from bridle.model.gguf_tower import fill_tower
from bridle.model.language_model import LanguageModel, attention_names
from bridle.model.own_attention import LIBRARY_ATTENTION
from bridle.model.plain_config import PlainConfig
from bridle.model.plain_decoder import PlainDecoder
from bridle.model.quantized_experts import PackedExperts
from bridle.model.staging import move_model
from bridle.model.weight_reading import making_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Maximum number of values that are decoded at once, in whole rows of a matrix.
_MAX_NUMBERS = 1 << 24
#: Layers that have the same input. They are computed as one layer if their weights are contiguous.
_SIDE_BY_SIDE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def read_gguf_model(
    source: GgufModel,
    settings: PreTrainedConfig | PlainConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None] = lambda share: None,
    tower: GgufModel | None = None,
) -> nn.Module:
    """Return the model of a GGUF file, with the vision tower of the file `tower`. On a CPU quantized matrices stay
    quantized; on other devices all weights become values of type `dtype`. Raises `UnsupportedModel` if a tensor of the
    file is missing, unknown, or of another shape."""
    if tower is not None:
        return _read_seeing(source, tower, settings, dtype, device, progress)
    is_plain = isinstance(settings, PlainConfig)
    model: Any = PlainDecoder(settings, dtype) if is_plain else _library_model(settings, dtype)
    filling = _Filling(source, find_family(source), model, dtype, keeps_blocks=device.type == "cpu")
    fill_buffers(model, filling.rules)
    filling.run(progress)
    if filling.family.layout != "mixed":
        _divide_frequencies(model, source)
    model.requires_grad_(False)
    return move_model(model.eval(), device)  # type: ignore[no-any-return]


def _read_seeing(
    source: GgufModel,
    tower: GgufModel,
    settings: Any,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None],
) -> nn.Module:
    whole = _library_model(settings, dtype, sees=True)
    fill_buffers(whole)
    model: Any = LanguageModel(whole)
    fill_tower(whole, model, tower, dtype)
    filling = _Filling(source, find_family(source), model, dtype, keeps_blocks=device.type == "cpu")
    filling.run(progress)
    _divide_frequencies(model, source)
    whole.lm_head = model.lm_head
    whole.requires_grad_(False)
    move_model(whole.eval(), device)
    return LanguageModel(whole).eval()


def _library_model(settings: PreTrainedConfig, dtype: torch.dtype, sees: bool = False) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    attention.register()
    kind: Any = AutoModelForMultimodalLM if sees else AutoModelForCausalLM
    own = LIBRARY_ATTENTION.get(settings.model_type, attention.ATTENTION_NAME)
    names: Any = attention_names(settings) if sees else own
    with making_model, torch.device("meta"):
        return kind.from_config(settings, attn_implementation=names, dtype=dtype)


class _Filling:
    """Fills the parameters of one model from the tensors of a file."""

    def __init__(
        self, source: GgufModel, family: GgufFamily, model: Any, dtype: torch.dtype, *, keeps_blocks: bool
    ) -> None:
        self.source, self.family, self.model = source, family, model
        self.dtype, self.keeps_blocks = dtype, keeps_blocks
        self.rules = _rules(family, source, model.config.num_hidden_layers)
        self.unused = set(source.tensors) - set(ROTATION_TENSORS)
        self.unused -= draft_tensors(source, model.config.num_hidden_layers)
        self.unused -= unread_tensors(source) if family.layout == "mixed" else set()
        self._head: QuantizedLinear | None = None  # the head whose rows are also those of the embedding

    def run(self, progress: Callable[[float], None]) -> None:
        total = max(self._num_unused(), 1)
        for name, module in list(self.model.named_modules()):
            self._fill(name, module)
            progress(1 - self._num_unused() / total)
        if self.unused:
            raise UnsupportedModel(
                f"{self.source.path} holds tensors that {type(self.model).__name__} does not use, such as "
                f"{sorted(self.unused)[0]!r}"
            )

    def _num_unused(self) -> int:
        """Return the total bytes of tensors that no parameter has used yet."""
        return sum(self.source.tensors[name].num_bytes for name in self.unused)

    def _fill(self, name: str, module: nn.Module) -> None:
        for parts in _SIDE_BY_SIDE:
            self._fill_together(name, [(part, vars(module)["_modules"].get(part)) for part in parts])
        if type(module) is nn.Linear and self._fill_linear(name, module):
            return
        if isinstance(module, nn.Embedding) and self._fill_embedding(name, module):
            return
        if self._fill_experts(name, module):
            return
        for field, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            full = f"{name}.{field}"
            if full == "lm_head.weight" and self.model.config.tie_word_embeddings:
                module._parameters[field] = self.model.get_input_embeddings().weight
                continue
            module._parameters[field] = nn.Parameter(self._numbers(full, tuple(parameter.shape)), requires_grad=False)
        for field, buffer in module._buffers.items():
            if buffer is not None and f"{name}.{field}" in self.rules:
                module._buffers[field] = self._numbers(f"{name}.{field}", tuple(buffer.shape), buffer.dtype)

    # -- packed ---------------------------------------------------------------------------------------------------

    def _fill_together(self, name: str, parts: Sequence[tuple[str, Any]]) -> None:
        """Replace linear layers that have the same input by quantized layers. If the blocks of all these layers have
        one type, the layers' weights are made contiguous in memory."""
        if not all(type(part) is nn.Linear for _, part in parts):
            return
        made = [self._make_linear(f"{name}.{part}", linear) for part, linear in parts]
        packed = [layer for layer in made if isinstance(layer, QuantizedLinear)]
        if len({(layer.kind, layer.in_features) for layer in packed}) == 1:
            prepare_side_by_side(packed)
        for (part, _), layer in zip(parts, made, strict=True):
            if layer is not None:
                layer.prepare()
                self._replace(f"{name}.{part}", layer)

    def _fill_linear(self, name: str, linear: nn.Linear) -> bool:
        """Replace a linear layer by a quantized one, if its matrix in the file is quantized. Return whether the layer
        was replaced."""
        if self.model.get_submodule(name) is not linear:
            return True  # filled together with others
        is_tied = name == "lm_head" and self.model.config.tie_word_embeddings
        made = (
            self._head
            if is_tied and linear.bias is None and self._head is not None
            else self._make_linear(name, linear)
        )
        if made is None:
            return False
        made.prepare()
        self._replace(name, made)
        return True

    def _make_linear(self, name: str, linear: nn.Linear) -> QuantizedLinear | ReorderedInputs | None:
        rule, layer = self._rule(f"{name}.weight")
        if name == "lm_head" and self.model.config.tie_word_embeddings:
            rule = next(rule for rule, _ in self.rules.values() if rule.file == EMBEDDING.file)
        files = [file_name(file, layer, ".weight") for file in rule.file]
        entries = [self._entry(file) for file in files]
        kind = entries[0].kind.name
        if (
            not self.keeps_blocks
            or kind in FLOATS
            or rule.change == "slice"
            or any(entry.kind.name != kind for entry in entries)
        ):
            return None
        shape = (linear.out_features, linear.in_features)
        self._check_shape(f"{name}.weight", (sum(entry.shape[0] for entry in entries), *entries[0].shape[1:]), shape)
        bias = None if linear.bias is None else self._numbers(f"{name}.bias", tuple(linear.bias.shape))
        if kind not in TYPES and shape[1] % 32:
            return None
        order, columns = self._order(rule.order, shape[0]), self._order(rule.columns, shape[1])
        parts = [self.source.read(file) for file in files]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        made = packed_matrix(kind, rows if order is None else rows[order.numpy()], shape, bias, self.dtype)
        self.unused.difference_update(files)
        return made if columns is None else ReorderedInputs(made, columns)

    def _fill_embedding(self, name: str, embedding: nn.Embedding) -> bool:
        rule, layer = self._rule(f"{name}.weight")
        file = rule.file[0].format(layer) + ".weight"
        entry = self._entry(file)
        if not self.keeps_blocks or entry.kind.name in FLOATS:
            return False
        self._check_shape(f"{name}.weight", entry.shape, (embedding.num_embeddings, embedding.embedding_dim))
        rows = torch.from_numpy(self.source.read(file))
        is_first = rule.file == EMBEDDING.file
        if self.model.config.tie_word_embeddings and entry.kind.name in TYPES and is_first:
            self._head = QuantizedLinear(TYPES[entry.kind.name], rows, entry.shape, None, self.dtype)
            self._head.prepare()
        self.unused.discard(file)
        shared = self._head if is_first else None
        self._replace(name, QuantizedEmbedding(entry.kind.name, shared or rows, embedding, self.dtype))
        return True

    def _fill_experts(self, name: str, module: nn.Module) -> bool:
        """Replace the experts of a layer by `PackedExperts`, if they are quantized in the file and each row consists of
        whole blocks. Return whether the experts were replaced."""
        shapes = {
            field: tuple(parameter.shape) for field, parameter in module._parameters.items() if parameter is not None
        }
        first = "gate_up_proj" if "gate_up_proj" in shapes else "up_proj"
        if not self.keeps_blocks or not hasattr(module, "has_gate") or not {first, "down_proj"} <= shapes.keys():
            return False
        rules = [self._rule(f"{name}.{field}") for field in (first, "down_proj")]
        files = [file.format(layer) for rule, layer in rules for file in rule.file]
        entries = [self._entry(f"{file}.weight") for file in files]
        if any(entry.kind.name in FLOATS or entry.shape[-1] % 32 for entry in entries):
            return False
        count, *inner = shapes[first]
        outer = shapes["down_proj"][1:]
        if rules[0][0].change == "woven":
            inner, outer = inner[::-1], outer[::-1]
        num_parts = len(files) - 1  # gates and values, together or apart, or values alone
        part = (count, inner[0] // num_parts, inner[1])
        for file, entry, wanted in zip(files, entries, (*[part] * num_parts, (count, *outer)), strict=True):
            self._check_shape(file, entry.shape, wanted)
        has_bias = "down_proj_bias" in shapes
        matrices = (self._matrices(file, has_bias) for file in files)
        experts = [(products[:-1], products[-1]) for products in zip(*matrices, strict=True)]
        self._replace(name, PackedExperts(module, experts))
        return True

    def _matrices(self, file: str, has_bias: bool) -> Iterator[QuantizedLinear]:
        """Yield a quantized layer for each expert, from a tensor that holds the matrices of all experts."""
        entry = self._entry(f"{file}.weight")
        count, *shape = entry.shape
        biases: Any = [None] * count
        if has_bias:
            biases = self.decode(f"{file}.bias")
            self._check_shape(f"{file}.bias", tuple(biases.shape), (count, shape[0]))
        rows = self.source.read(f"{file}.weight").reshape(count, shape[0], -1)
        for blocks, bias in zip(rows, biases, strict=True):
            made = packed_matrix(entry.kind.name, blocks, (shape[0], shape[1]), bias, self.dtype)
            made.prepare()
            yield made
        self.unused.discard(f"{file}.weight")

    def _replace(self, name: str, made: nn.Module) -> None:
        parent, _, last = name.rpartition(".")
        setattr(self.model.get_submodule(parent), last, made)

    # -- numbers --------------------------------------------------------------------------------------------------

    def _numbers(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor that transformers calls `name`, decoded to floats."""
        rule, layer = self._rule(name)
        if rule.change == "listed":
            return torch.full(shape, self._listed(rule.file[0], layer), dtype=dtype or self.dtype)
        suffix = suffix_of(name)
        parts = [self.decode(file_name(file, layer, suffix), dtype) for file in rule.file]
        try:
            tensor = library_form(rule, parts, shape, suffix)
        except (RuntimeError, IndexError, ValueError):
            shapes = " and ".join(str(tuple(part.shape)) for part in parts)
            raise UnsupportedModel(
                f"{self.source.path}: the tensors of weight {name!r} have shapes {shapes}, which do not match"
            ) from None
        self._check_shape(name, tuple(tensor.shape), shape)
        for dim, order in ((0, rule.order), (-1, rule.columns)):
            rows = self._order(order, shape[dim])
            tensor = tensor if rows is None else tensor.index_select(dim, rows)
        return tensor

    def _listed(self, key: str, layer: int) -> float:
        numbers = self.source.numbers(key)
        if len(numbers) <= layer:
            raise UnsupportedModel(f"{self.source.path}: {key} has no value for layer {layer}")
        return float(numbers[layer])

    def decode(self, file: str, dtype: torch.dtype | None = None) -> Tensor:
        """Decode a tensor of the file to floats, with the shape that it has in the file."""
        entry = self._entry(file)
        rows = torch.from_numpy(self.source.read(file))
        numbers = torch.empty(rows.shape[0], entry.shape[-1], dtype=dtype or self.dtype)
        step = max(1, _MAX_NUMBERS // entry.shape[-1])
        for at in range(0, rows.shape[0], step):
            numbers[at : at + step] = decode_blocks(entry.kind.name, rows[at : at + step])
        self.unused.discard(file)
        return numbers.view(entry.shape)

    def _rule(self, name: str) -> tuple[TensorRule, int]:
        for known in (name, name.rpartition(".")[0]):
            if known in self.rules:
                return self.rules[known]
        raise UnsupportedModel(f"{self.source.path}: weight {name!r} has no tensor name in files of its architecture")

    def _entry(self, file: str) -> Any:
        entry = self.source.tensors.get(file)
        if entry is None:
            raise UnsupportedModel(f"{self.source.path} lacks tensor {file!r}")
        return entry

    def _order(self, order: Order, num_rows: int) -> Tensor | None:
        try:
            return library_order(order, num_rows, self.model.config)
        except ValueError as error:
            raise UnsupportedModel(f"{self.source.path}: {error}") from None

    def _check_shape(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != wanted:
            raise UnsupportedModel(
                f"{self.source.path}: weight {name!r} has shape {found}, but its metadata implies {wanted}"
            )


def _rules(family: GgufFamily, source: GgufModel, num_layers: int) -> dict[str, tuple[TensorRule, int]]:
    """Return the rule and the layer number of each tensor of transformers. If a tensor has several rules, the first
    rule whose tensors are in the file is used."""
    found: dict[str, tuple[TensorRule, int]] = {}
    for rule in reversed(family.rules):
        for layer in range(num_layers) if "{}" in rule.model else range(1):
            name = rule.model.format(layer)
            if name in found and not _is_present(rule, layer, source) and _is_present(*found[name], source):
                continue
            found[name] = rule, layer
    return found


def _is_present(rule: TensorRule, layer: int, source: GgufModel) -> bool:
    suffix = suffix_of(rule.model)
    return all(file_name(file, layer, suffix) in source.tensors for file in rule.file)


def _divide_frequencies(model: Any, source: GgufModel) -> None:
    """Apply Llama 3's scaling of rotary positions. A file stores the scaling as a divisor for each frequency."""
    if "rope_freqs.weight" not in source.tensors:
        return
    factors = torch.tensor(read_line(source, "rope_freqs.weight"))
    modules = [module for module in model.modules() if "inv_freq" in module._buffers]
    for module in modules:
        if module.inv_freq.shape != factors.shape or not bool((factors > 0).all()):
            raise UnsupportedModel(f"{source.path}: the {len(factors)} factors of rope_freqs do not fit the model")
        module.inv_freq = module.inv_freq / factors
        module.original_inv_freq = module.inv_freq.clone()
    if not modules:
        raise UnsupportedModel(f"{source.path}: the file has rope_freqs, but the model has no RoPE")
