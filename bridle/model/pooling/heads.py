"""The layers after a pooling model's encoder: the modules of an embedding model, or the head of a classifier. A
classifier head of transformers gets all hidden states of a text and selects one position. In bridle, the position is
selected first, for all texts of a packed pass, and the head gets one hidden state per text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from bridle.errors import UnsupportedModel
from bridle.model.pooling.modules import Dense, LayerNorm, Module, PoolingLayer
from bridle.model.pooling.segments import Segments

#: Computes a vector of each text, [N, size], from the hidden states [T, hidden] of packed texts, in the order of the
#: layout.
Head = Callable[[Tensor, Segments], Tensor]


def pooled(rows: Tensor, segments: Segments, mode: str) -> Tensor:
    """Pool the hidden states of each text to one vector: [T, hidden] -> [N, hidden] in float32"""
    return torch.cat([_POOLS[mode](block.of(rows).float()) for block in segments.blocks])


def _weighted(rows: Tensor) -> Tensor:
    weights = torch.arange(1, rows.shape[1] + 1, device=rows.device, dtype=rows.dtype)  # [L]
    return (rows * weights[:, None]).sum(1) / weights.sum()


_POOLS: dict[str, Callable[[Tensor], Tensor]] = {  # [num_texts, length, hidden] -> [num_texts, hidden]
    "cls": lambda rows: rows[:, 0],
    "lasttoken": lambda rows: rows[:, -1],
    "mean": lambda rows: rows.mean(1),
    "max": lambda rows: rows.amax(1),
    "mean_sqrt_len": lambda rows: rows.sum(1) / rows.shape[1] ** 0.5,
    "weightedmean": _weighted,
}


# -- embedding models ----------------------------------------------------------------------------------------


def embedding_head(modules: Sequence[Module], folder: Path, size: int, device: torch.device) -> tuple[Head, int]:
    """Return the head of an embedding model whose hidden states have `size` values, and the length of the head's
    vectors. Raises `UnsupportedModel` if the sizes of consecutive modules do not match."""
    first, *others = modules
    assert isinstance(first, PoolingLayer)  # other modules were refused before
    size *= len(first.modes)
    steps: list[Callable[[Tensor], Tensor]] = []
    for module in others:
        step, size = _step(module, folder, size, device)
        steps.append(step)

    def head(rows: Tensor, segments: Segments) -> Tensor:
        vectors = torch.cat([pooled(rows, segments, mode) for mode in first.modes], -1)
        for step in steps:
            vectors = step(vectors)
        return vectors

    return head, size


def _step(module: Module, folder: Path, size: int, device: torch.device) -> tuple[Callable[[Tensor], Tensor], int]:
    if isinstance(module, Dense):
        layer = nn.Linear(module.in_features, module.out_features, bias=module.has_bias)
        _fill(layer, folder / module.folder, "linear", size, module.in_features)
        layer, activate = layer.to(device), _ACTIVATIONS[module.activation]
        return lambda vectors: activate(layer(vectors)), module.out_features
    if isinstance(module, LayerNorm):
        norm = nn.LayerNorm(module.dimension)
        _fill(norm, folder / module.folder, "norm", size, module.dimension)
        norm = norm.to(device)
        return lambda vectors: norm(vectors), size
    return lambda vectors: functional.normalize(vectors, dim=-1), size


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "identity": lambda vectors: vectors,
}


def _fill(layer: nn.Module, folder: Path, prefix: str, found: int, wanted: int) -> None:
    """Read the weights of `layer` from its folder. Raises `UnsupportedModel` if a weight is missing or has another
    shape."""
    if found != wanted:
        raise UnsupportedModel(f"{folder} needs vectors of size {wanted}; the module before it gives {found}")
    path = folder / "model.safetensors"
    if not path.is_file():
        raise UnsupportedModel(f"{folder} has no model.safetensors; pickled weights are not loaded: convert them")
    try:
        tensors = load_file(path)
    except Exception as error:  # safetensors has its own error class
        raise UnsupportedModel(f"{path} is damaged: {error}") from error
    for name, parameter in layer.named_parameters():
        tensor = tensors.get(f"{prefix}.{name}")
        if tensor is None or tensor.shape != parameter.shape:
            shape = None if tensor is None else tuple(tensor.shape)
            raise UnsupportedModel(
                f"{path} has {shape} as {prefix}.{name}; its config.json implies {tuple(parameter.shape)}"
            )
        parameter.data = tensor.float()
        parameter.requires_grad_(False)


# -- classifiers ---------------------------------------------------------------------------------------------


def classifier_head(model: Any) -> Head:
    """Return the head of a sequence classifier. Raises `UnsupportedModel` for a family whose head is unknown."""
    if hasattr(model, "score"):  # all decoders: the logits of the last token
        return lambda rows, segments: model.score(_picked(model, rows, segments, "lasttoken"))
    family = str(model.config.model_type)
    make = _CLASSIFIERS.get(family)
    if make is None:
        known = ", ".join(sorted(_CLASSIFIERS))
        raise UnsupportedModel(f"model type {family!r} has an unknown classifier; known are {known}, decoders")
    return make(model)


def _picked(model: Any, rows: Tensor, segments: Segments, mode: str) -> Tensor:
    """Pool the hidden states of each text: [T, hidden] -> [N, hidden] in the type of the hidden states."""
    return pooled(rows, segments, mode).to(rows.dtype)


def _by_pooler(model: Any) -> Head:
    """Return the head for families whose encoder ends in a pooler that reads position 0."""

    def head(rows: Tensor, segments: Segments) -> Tensor:
        first = _picked(model, rows, segments, "cls")[:, None]  # [N, 1, hidden]: the pooler reads position 0
        found: Tensor = model.classifier(model.base_model.pooler(first))
        return found

    return head


def _by_position(model: Any) -> Head:
    """Return the head for families whose classifier itself reads position 0."""
    return lambda rows, segments: model.classifier(_picked(model, rows, segments, "cls")[:, None])


def _deberta(model: Any) -> Head:
    def head(rows: Tensor, segments: Segments) -> Tensor:
        first = _picked(model, rows, segments, "cls")[:, None]  # [N, 1, hidden]: its pooler reads position 0
        found: Tensor = model.classifier(model.pooler(first))
        return found

    return head


def _distilbert(model: Any) -> Head:
    def head(rows: Tensor, segments: Segments) -> Tensor:
        first = _picked(model, rows, segments, "cls")
        found: Tensor = model.classifier(torch.relu(model.pre_classifier(first)))
        return found

    return head


def _modernbert(model: Any) -> Head:
    mode = str(model.config.classifier_pooling)
    if mode not in ("cls", "mean"):
        raise UnsupportedModel(f"classifier_pooling is {mode!r}; must be 'cls' or 'mean'")
    return lambda rows, segments: model.classifier(model.head(_picked(model, rows, segments, mode)))


_CLASSIFIERS: dict[str, Callable[[Any], Head]] = {
    "bert": _by_pooler,
    "ernie": _by_pooler,
    "gte": _by_pooler,
    "nomic_bert": _by_pooler,
    "camembert": _by_position,
    "deberta": _deberta,
    "deberta-v2": _deberta,
    "electra": _by_position,
    "jina_embeddings_v3": _by_position,
    "mpnet": _by_position,
    "roberta": _by_position,
    "xlm-roberta": _by_position,
    "xlm-roberta-xl": _by_position,
    "distilbert": _distilbert,
    "modernbert": _modernbert,
}
