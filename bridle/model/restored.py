"""Converts a dense model to a description and tensors, and back. All layers of the model must be lean layers with
weights in the order of the kernels. The description holds only numbers and names. A model that is restored from a
description gives the same bits as the original. `bridle.model.model_cache` compares the restored model with the
original before it stores a description.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from bridle.cpu_kernels.ggml import TYPES
from bridle.cpu_kernels.kernels import Kernels
from bridle.cpu_kernels.linear import FloatLinear, NativeWeight, QuantizedLinear
from bridle.cpu_kernels.packing import PackedMatrix
from bridle.model.dense_layer import DenseLayer, HeadNorm, Joined, Norm, gelu_tanh
from bridle.model.embedding import QuantizedEmbedding
from bridle.model.forward_context import AttentionOptions
from bridle.model.quantize import Int8Linear

_ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}


class CannotDescribe(Exception):
    """Raised for a part of the model that a description cannot represent."""


class LinearPart(msgspec.Struct, frozen=True, array_like=True):
    """A packed matrix. Tensor fields are indices into the list of tensors. `kind` is one of
    `bridle.cpu_kernels.packing.KINDS`."""

    kind: str
    weights: int
    scales: int
    outputs: int
    inputs: int
    given: int
    bias: int | None


class NormPart(msgspec.Struct, frozen=True, array_like=True):
    weight: int
    eps: float
    is_wide: bool
    is_of_all: bool = False
    num_heads: int = 0


class LayerPart(msgspec.Struct, frozen=True):
    layer_idx: int
    head_dim: int
    num_heads: int
    num_kv_heads: int
    num_gates: int
    attention_parts: tuple[str, ...]
    mlp_parts: tuple[str, ...]
    qkv: tuple[LinearPart, ...]
    out: tuple[LinearPart, ...]
    gate_up: tuple[LinearPart, ...]
    down: tuple[LinearPart, ...]
    norm: NormPart | None
    last_norm: NormPart | None
    mlp_norm: NormPart | None
    mlp_last_norm: NormPart | None
    head_norm: NormPart | None
    act: str
    share: float
    is_rotated: bool
    table: str | None
    scaling: float
    window: int | None
    softcap: float | None
    sinks: int | None


class TablePart(msgspec.Struct, frozen=True, array_like=True):
    """Rotary frequencies for the layers that use the rotation table `name`."""

    name: str | None
    frequencies: int
    scaling: float


class EmbeddingPart(msgspec.Struct, frozen=True):
    """An embedding, with rows of floats or blocks of type `kind`. If `rows` is None, the embedding shares the rows of
    the output head."""

    kind: str
    rows: int | None
    scale: int | None
    size: int
    width: int


class ModelPart(msgspec.Struct, frozen=True):
    embedding: EmbeddingPart
    layers: tuple[LayerPart, ...]
    tables: tuple[TablePart, ...]
    norm: NormPart
    head: tuple[LinearPart, ...]
    hidden_size: int
    embedding_multiplier: float
    logits_scaling: float
    final_softcap: float | None


# -- describing --------------------------------------------------------------------------------------------------


class Describer:
    """Describes a model, and collects its tensors in a list."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._numbers: dict[tuple[int, int, torch.dtype], int] = {}

    def model(self, model: Any, table_names: Sequence[str | None]) -> ModelPart:
        """Return the description of `model`, which must have only lean layers. Raises `CannotDescribe`."""
        body, config = model.model, model.config
        names = list(dict.fromkeys(table_names))
        return ModelPart(
            embedding=self._embedding(body.embed_tokens),
            layers=tuple(self._layer(layer, table_names[layer.layer_idx]) for layer in body.layers),
            tables=tuple(self._table(body.rotary_emb, name) for name in names),
            norm=self._norm(Norm(body.norm)),
            head=self._linear(model.lm_head),
            hidden_size=int(config.hidden_size),
            embedding_multiplier=float(getattr(body, "embedding_multiplier", 1.0)),
            logits_scaling=float(getattr(config, "logits_scaling", 1.0)),
            final_softcap=getattr(config, "final_logit_softcapping", None),
        )

    def _add(self, tensor: Tensor) -> int:
        tensor = tensor.detach()
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype)
        if key not in self._numbers or not tensor.numel():
            self._numbers[key] = len(self.tensors)
            self.tensors.append(tensor)
        return self._numbers[key]

    def _maybe(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self._add(tensor)

    def _layer(self, layer: DenseLayer, table: str | None) -> LayerPart:
        options = layer.options
        act = next((name for name, function in _ACTIVATIONS.items() if layer.act is function), None)
        if act is None:
            raise CannotDescribe(f"activation type {type(layer.act).__name__} is not supported")
        return LayerPart(
            layer_idx=layer.layer_idx,
            head_dim=layer.head_dim,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            num_gates=layer.num_gates,
            attention_parts=layer.attention_parts,
            mlp_parts=layer.mlp_parts,
            qkv=self._linear(layer.qkv),
            out=self._linear(layer.out),
            gate_up=self._linear(layer.gate_up),
            down=self._linear(layer.down),
            norm=self._maybe_norm(layer.norm),
            last_norm=self._maybe_norm(layer.last_norm),
            mlp_norm=self._maybe_norm(layer.mlp_norm),
            mlp_last_norm=self._maybe_norm(layer.mlp_last_norm),
            head_norm=self._maybe_norm(layer.head_norm),
            act=act,
            share=layer.share,
            is_rotated=layer.is_rotated,
            table=table,
            scaling=options.scaling,
            window=options.window,
            softcap=options.softcap,
            sinks=self._maybe(options.sinks),
        )

    def _linear(self, module: Any) -> tuple[LinearPart, ...]:
        parts = list(module.parts) if isinstance(module, Joined) else [module]
        return tuple(self._part(part) for part in parts)

    def _part(self, part: Any) -> LinearPart:
        native = getattr(part, "native", None)
        if not isinstance(part, (QuantizedLinear, FloatLinear, Int8Linear)) or native is None:
            raise CannotDescribe(f"no kernel computes layer type {type(part).__name__}")
        packed = native.packed
        sizes = (packed.outputs, packed.inputs, packed.given)
        return LinearPart(
            packed.kind, self._add(packed.weights), self._add(packed.scales), *sizes, self._maybe(part.bias)
        )

    def _maybe_norm(self, norm: Norm | None) -> NormPart | None:
        return None if norm is None else self._norm(norm)

    def _norm(self, norm: Norm) -> NormPart:
        weight = self._add(norm.weight.contiguous())
        if isinstance(norm, HeadNorm):
            return NormPart(weight, norm.eps, norm.is_wide, norm.is_of_all, norm.num_heads)
        return NormPart(weight, norm.eps, norm.is_wide)

    def _table(self, rotary: Any, name: str | None) -> TablePart:
        prefix = "" if name is None else f"{name}_"
        frequencies, scaling = getattr(rotary, f"{prefix}inv_freq"), getattr(rotary, f"{prefix}attention_scaling")
        return TablePart(name, self._add(frequencies), float(scaling))

    def _embedding(self, module: Any) -> EmbeddingPart:
        size = (module.num_embeddings, module.embedding_dim)
        if isinstance(module, QuantizedEmbedding):
            return EmbeddingPart(module.kind, self._maybe(module.blocks), self._maybe(module.scale), *size)
        if not isinstance(module, nn.Embedding):
            raise CannotDescribe(f"embedding type {type(module).__name__} is not supported")
        scale = getattr(module, "embed_scale", None)
        return EmbeddingPart("", self._add(module.weight), self._maybe(scale), *size)


# -- restoring ---------------------------------------------------------------------------------------------------


class RestoredModel(nn.Module):
    """A restored model, with the attribute names of the model class in transformers. Callers use only the parts of a
    restored model, because it has no forward pass of its own."""

    def __init__(self, part: ModelPart, tensors: Sequence[Tensor], found: Kernels) -> None:
        super().__init__()
        made = _Restorer(tensors, found)
        self.config = SimpleNamespace(
            hidden_size=part.hidden_size,
            logits_scaling=part.logits_scaling,
            final_logit_softcapping=part.final_softcap,
            layer_types=[layer.table for layer in part.layers],
        )
        self.lm_head = made.linear(part.head)
        self.model = nn.Module()
        body: Any = self.model
        body.embed_tokens = made.embedding(part.embedding, self.lm_head)
        body.layers = nn.ModuleList(made.layer(layer) for layer in part.layers)
        body.rotary_emb = Rotary(part.tables, tensors)
        body.norm = made.norm(part.norm)
        body.embedding_multiplier = part.embedding_multiplier

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool, logits_to_keep: Tensor) -> Any:
        """Provide the signature that callers inspect. This method is never called, because callers use the model's
        layers directly."""
        raise NotImplementedError

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


class Rotary(nn.Module):
    """Computes cosines and sines of positions from fixed frequencies, as transformers does."""

    def __init__(self, parts: Sequence[TablePart], tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tables = {part.name: (tensors[part.frequencies], part.scaling) for part in parts}

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of positions [1, T]: two tensors [1, T, D]"""
        frequencies, scaling = self._tables[layer_type]
        freqs = position_ids[..., None].float() * frequencies
        angles = torch.cat((freqs, freqs), -1)
        return (angles.cos() * scaling).to(x.dtype), (angles.sin() * scaling).to(x.dtype)


class PlainEmbedding(nn.Module):
    """An embedding with floating-point rows, which are multiplied by a scale."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings of ids: [...] -> [..., hidden]"""
        weight: Any = self.weight
        return nn.functional.embedding(ids, weight) * self.scale.to(weight.dtype)  # type: ignore[operator]


class _Restorer:
    def __init__(self, tensors: Sequence[Tensor], found: Kernels) -> None:
        self._tensors, self._found = tensors, found

    def _maybe(self, number: int | None) -> Tensor | None:
        return None if number is None else self._tensors[number]

    def linear(self, parts: Sequence[LinearPart]) -> nn.Module:
        made = [self._part(part) for part in parts]
        return made[0] if len(made) == 1 else Joined(made)

    def _part(self, part: LinearPart) -> nn.Module:
        packed = PackedMatrix(
            part.kind, self._tensors[part.weights], self._tensors[part.scales], part.outputs, part.inputs, part.given
        )
        bias = self._maybe(part.bias)
        if part.kind in TYPES:
            return QuantizedLinear.from_packed(TYPES[part.kind], packed, bias, torch.float32, self._found)
        native = NativeWeight(self._found, packed, bias)
        return Int8Linear.from_packed(native, bias) if part.kind == "int8" else FloatLinear.from_packed(native, bias)

    def norm(self, part: NormPart) -> Norm:
        made: Norm = HeadNorm.__new__(HeadNorm) if part.num_heads else Norm.__new__(Norm)
        made.weight, made.eps, made.is_wide = self._tensors[part.weight], part.eps, part.is_wide
        if isinstance(made, HeadNorm):
            made.is_of_all, made.num_heads = part.is_of_all, part.num_heads
        return made

    def embedding(self, part: EmbeddingPart, head: nn.Module) -> nn.Module:
        scale, rows = self._maybe(part.scale), self._maybe(part.rows)
        if part.kind:
            original = SimpleNamespace(num_embeddings=part.size, embedding_dim=part.width, embed_scale=scale)
            weight: Any = head if rows is None else rows
            return QuantizedEmbedding(part.kind, weight, original, torch.float32)
        assert rows is not None
        if scale is not None:
            return PlainEmbedding(rows, scale)
        made = nn.Embedding(0, part.width, _weight=rows[:0])
        made.weight, made.num_embeddings = nn.Parameter(rows, requires_grad=False), part.size
        return made

    def layer(self, part: LayerPart) -> DenseLayer:
        made = DenseLayer.__new__(DenseLayer)
        nn.Module.__init__(made)
        for name in (
            *("layer_idx", "head_dim", "num_heads", "num_kv_heads", "num_gates", "attention_parts", "mlp_parts"),
            *("share", "is_rotated"),
        ):
            setattr(made, name, getattr(part, name))
        made.qkv, made.out = self.linear(part.qkv), self.linear(part.out)
        made.gate_up, made.down = self.linear(part.gate_up), self.linear(part.down)
        norms = (part.norm, part.last_norm, part.mlp_norm, part.mlp_last_norm, part.head_norm)
        *four, head_norm = [None if norm is None else self.norm(norm) for norm in norms]
        made.norm, made.last_norm, made.mlp_norm, made.mlp_last_norm = four
        made.head_norm = head_norm if isinstance(head_norm, HeadNorm) else None
        made.act = _ACTIVATIONS[part.act]
        made.table = 0
        made.options = AttentionOptions(part.scaling, part.window, part.softcap, self._maybe(part.sinks))
        made._rotated = part.num_heads + part.num_kv_heads
        return made
