"""The memory pool for recurrent states of one loaded model. A slot holds the states of one sequence in all recurrent
layers.

A layer keeps several tensors, such as the last inputs of a convolution and the state of a recurrence. Shapes and types
are determined by a dry forward pass. The engine, not this module, records which sequence owns which slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from bridle.model.h2d_copies import upload

#: Key of a tensor of a layer: "conv" or "recurrent", and its number among the tensors of this kind.
StateKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class StateShape:
    """The shape and type of one state tensor of a layer, for one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


#: The shapes of the tensors of each recurrent layer, by layer number.
StateShapes = Mapping[int, Mapping[StateKey, StateShape]]


def state_bytes(shapes: StateShapes) -> int:
    """Return the bytes of one sequence's state in all layers."""
    return sum(part.num_bytes for layer in shapes.values() for part in layer.values())


class StatePool:
    """The state tensors [slots, ...] of each recurrent layer. A slot is uninitialized until a batch row writes to
    it."""

    def __init__(self, shapes: StateShapes, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self._device = device
        self._views: dict[tuple[int, int], dict[StateKey, Tensor]] = {}
        self.layers = {
            number: {
                key: torch.empty((num_slots, *part.shape), dtype=part.dtype, device=device)
                for key, part in layer.items()
            }
            for number, layer in shapes.items()
        }

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for layer in self.layers.values() for part in layer.values())

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """In every layer, copy slot `source` to slot `target` for each (source, target) in `pairs`. All sources are
        read before any target is written."""
        if self._device.type == "cpu" and {source for source, _ in pairs}.isdisjoint(target for _, target in pairs):
            for number, parts in self.layers.items():
                for key in parts:
                    for source, target in pairs:
                        self.save(number, source, target, key)  # without a temporary copy of all sources
            return
        sources, targets = upload(np.array(pairs, np.int64), self._device).unbind(1)
        for layer in self.layers.values():
            for part in layer.values():
                part.index_copy_(0, targets, part.index_select(0, sources))

    def view(self, layer: int, slot: int) -> dict[StateKey, Tensor]:
        """Return views of the tensors of one slot in one layer. The views are cached, because creating them in each
        step takes time."""
        found = self._views.get((layer, slot))
        if found is None:
            found = {key: part[slot] for key, part in self.layers[layer].items()}
            self._views[layer, slot] = found
        return found

    def save(self, layer: int, source: int, target: int, key: StateKey) -> None:
        """Copy one tensor of a layer from slot `source` to slot `target`."""
        part = self.layers[layer][key]
        part[target] = part[source]


@dataclass(frozen=True, slots=True)
class RowStates:
    """The state tensors of one sequence in one layer. If `is_fresh`, the sequence starts here, and the tensors'
    contents are ignored."""

    tensors: dict[StateKey, Tensor]
    is_fresh: bool

    def state(self, key: StateKey, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the tensor of a key, to be written in place. If the slot does not have this tensor yet, it is
        created."""
        held = self.tensors.get(key)
        if held is None:
            held = self.tensors[key] = torch.zeros(shape, dtype=dtype, device=device)
        return held


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive packed tokens of one sequence as input of a recurrent layer, with the sequence's states."""

    length: int
    states: RowStates
    after: Callable[[StateKey], None] | None = None

    def went_in(self, key: StateKey) -> None:
        """Report that the state tensor `key` now includes the span's last token."""
        if self.after is not None:
            self.after(key)
