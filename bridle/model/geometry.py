"""Determines the shapes of a model's attention by a dry forward pass, in which every attention call is recorded. The
configuration is not enough: field names differ between families, head sizes may differ between layers, and values may
be narrower than keys. The dry pass also checks the model: each layer must call attention, and no layer may pass a
keyword argument that the kernels would ignore.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bridle.errors import UnsupportedModel
from bridle.model.compressed_windows import Compressed
from bridle.model.forward_context import AttentionOptions, attention_handler
from bridle.model.index_selection import IndexRow, Selection
from bridle.model.state_mixer import wrap_mixers
from bridle.model.state_pool import RowStates, Span, StateKey, StateShape

#: Keywords that reach attention functions and change nothing for a packed causal pass.
HARMLESS = frozenset(
    {
        "cache_position",
        "dropout",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "shared_kv_states",
        "use_cache",
        "num_items_in_batch",
        "layer_type",
    }
)


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """The attention shape of one layer. Keys have `key_dim` values per head, and values `value_dim`."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    has_softcap: bool = False
    has_sinks: bool = False

    @property
    def numbers_per_token(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class GeometryRecorder:
    """An attention handler that computes nothing. The handler records the layer of each call, with shapes and other
    keyword arguments."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerGeometry] = {}
        self.calls: Counter[int] = Counter()
        self.problems: list[str] = []
        self.states: dict[int, dict[StateKey, Tensor]] = {}
        self.mixers: Counter[int] = Counter()
        self.indexes: dict[int, LayerGeometry] = {}

    def index_rows(self, layer: int, num_tokens: int) -> list[IndexRow]:
        """Return the tokens of the dry pass for an indexer, as one sequence."""
        return [IndexRow(0, num_tokens, 0, partial(self._keep_index, layer))]

    def _keep_index(self, layer: int, first: int, keys: Tensor) -> Tensor:
        half = keys.shape[1] // 2
        self.indexes[layer] = LayerGeometry(1, 1, half, keys.shape[1] - half)
        return keys

    def spans(self, layer: int, num_tokens: int) -> list[Span]:
        """Return the tokens of the dry pass for a recurrent layer, as one sequence. The recorder keeps the recurrent
        states of this sequence."""
        self.mixers[layer] += 1
        return [Span(num_tokens, RowStates(self.states.setdefault(layer, {}), is_fresh=True))]

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
        extra: dict[str, Any],
    ) -> Tensor:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            self.problems.append(f"{type(module).__name__} does not say which layer it is")
            layer = -1
        self._judge(module, query, key, extra)
        if isinstance(found := extra.get("indices"), Compressed):
            self.indexes[layer] = LayerGeometry(1, 1, found.num_inputs, found.index_dim)
        self.calls[layer] += 1
        self.layers[layer] = LayerGeometry(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[2],
            value_dim=value.shape[2],
            window=options.window,
            has_softcap=options.softcap is not None,
            has_sinks=options.sinks is not None,
        )
        return query.new_zeros(*query.shape[:2], value.shape[2])

    def _judge(self, module: nn.Module, query: Tensor, key: Tensor, extra: dict[str, Any]) -> None:
        if getattr(module, "is_causal", True) is False or extra.get("is_causal") is False:
            self.problems.append(f"{type(module).__name__} attends in both directions")
        for name, value in extra.items():
            if value is None or name == "is_causal" or name in HARMLESS:
                continue
            if not isinstance(value, (Selection, Compressed)):
                self.problems.append(f"{type(module).__name__} hands over {name!r}, which no kernel here honors")
        if query.shape[0] != key.shape[0]:
            self.problems.append(
                f"{type(module).__name__} attends from {query.shape[0]} to {key.shape[0]} positions in one pass"
            )
        if query.shape[1] % key.shape[1]:
            self.problems.append(f"{query.shape[1]} query heads do not share {key.shape[1]} key heads evenly")


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shapes of a model's caches by layer number: keys and values, recurrent states, and index keys. `vocab_size` is
    the width of a logits row. An index key has two halves, which are cached as a key and a value. `indexes` also has
    the values that compressors store for each token (see `compressed_windows`)."""

    layers: dict[int, LayerGeometry]
    vocab_size: int
    states: dict[int, dict[StateKey, StateShape]] = field(default_factory=dict)
    indexes: dict[int, LayerGeometry] = field(default_factory=dict)

    @property
    def cached(self) -> dict[int, LayerGeometry]:
        """Return the shapes of all layers in the KV cache, by number. The index keys of layer n are cached as layer
        `~n`."""
        return self.layers | {~number: shape for number, shape in self.indexes.items()}

    @property
    def numbers_per_token(self) -> int:
        """Return how many values one token takes in the whole cache."""
        return sum(shape.numbers_per_token for shape in self.cached.values())


def discover_geometry(model: nn.Module, num_layers: int, device: torch.device) -> Geometry:
    """Wrap recurrent layers, then run the dry forward pass. Raises `UnsupportedModel` with the reason if the
    model cannot be served."""
    recorder = GeometryRecorder()
    wrap_mixers(model)
    ids = torch.arange(4, device=device).unsqueeze(0)  # [1, 4]
    name = type(getattr(model, "whole", model)).__name__
    try:
        with torch.inference_mode(), attention_handler(recorder):
            output = model(input_ids=ids, position_ids=ids, use_cache=False)
    except Exception as error:
        raise UnsupportedModel(f"{name} cannot run a packed forward pass: {type(error).__name__}: {error}") from error
    _check_calls(name, recorder, num_layers)
    states = {
        layer: {key: StateShape(tuple(part.shape), part.dtype) for key, part in parts.items()}
        for layer, parts in sorted(recorder.states.items())
    }
    return Geometry(dict(sorted(recorder.layers.items())), int(output.logits.shape[-1]), states, recorder.indexes)


def _check_calls(name: str, recorder: GeometryRecorder, num_layers: int) -> None:
    if not (recorder.calls or recorder.mixers):
        raise UnsupportedModel(f"{name} has its own attention that cannot use a paged cache (0 of {num_layers} layers)")
    if recorder.problems:
        raise UnsupportedModel(f"{name} would give wrong results: {recorder.problems[0]}")
    num_kept = len(recorder.calls | recorder.mixers)
    if num_kept != num_layers:
        raise UnsupportedModel(
            f"{name} has layers that are not attention (recurrent or convolutional) and keep no state in a cache: only "
            f"{num_kept} of {num_layers} do. The other layers would mix up the sequences of a batch"
        )
    for what, calls in (("attends", recorder.calls), ("updates its state", recorder.mixers)):
        twice = [layer for layer, count in calls.items() if count > 1]
        if twice:
            raise UnsupportedModel(f"layer {twice[0]} of {name} {what} more than once per token")
