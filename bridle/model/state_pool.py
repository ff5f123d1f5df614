"""The pool of recurrent states of one loaded model: a slot holds the states of all its recurrent layers.

A layer keeps several tensors, such as the last inputs of a convolution and the state of a recurrence. Shapes and number
types are learned from a dry pass. Who owns which slot is the engine's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bridle.model.h2d_copies import upload

#: A tensor of a layer: "conv" or "recurrent", and its number among those of its kind.
StateKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor of a layer, of one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


#: The tensors of each recurrent layer, by layer number.
StateShapes = Mapping[int, Mapping[StateKey, StateShape]]


def state_bytes(shapes: StateShapes) -> int:
    """The bytes of one sequence's state in all layers."""
    return sum(part.num_bytes for layer in shapes.values() for part in layer.values())


class StatePool:
    """Tensors [slots, ...] of each recurrent layer. A slot is uninitialized until a row has written it."""

    def __init__(self, shapes: StateShapes, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self._device = device
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
        """Copy slot source to slot target in every layer, for each (source, target) of `pairs`; all are read before any
        is written."""
        sources, targets = upload(np.array(pairs, np.int64), self._device).unbind(1)
        for layer in self.layers.values():
            for part in layer.values():
                part.index_copy_(0, targets, part.index_select(0, sources))

    def view(self, layer: int, slot: int) -> dict[StateKey, Tensor]:
        """The tensors [1, ...] of one slot in one layer: views."""
        return {key: part.narrow(0, slot, 1) for key, part in self.layers[layer].items()}

    def save(self, layer: int, source: int, target: int, kind: str) -> None:
        """Copy a layer's tensors of one kind from slot `source` to slot `target`."""
        for key, part in self.layers[layer].items():
            if key[0] == kind:
                part[target] = part[source]


class RowStates:
    """The states of one sequence in one layer, in the form in which the library's mixers ask a cache for them.

    `tensors` hold them, each [1, ...]; those that are missing are made when they are first stored. With `is_fresh` the
    sequence has no state yet, whatever the tensors hold.
    """

    def __init__(self, tensors: dict[StateKey, Tensor], is_fresh: bool) -> None:
        self.tensors = tensors
        self._is_fresh = is_fresh

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution; None for a sequence without a state."""
        return None if self._is_fresh else self.tensors["conv", state_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state of a recurrence; None for a sequence without a state."""
        return None if self._is_fresh else self.tensors["recurrent", state_idx]

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: object
    ) -> Tensor:
        """Append inputs [1, ..., T]; returns the kept ones with them. Before the first there are zeros."""
        held = self.tensors.get(("conv", state_idx))
        width = held.shape[-1] if held is not None else conv_kernel_size or conv_states.shape[-1]
        if self._is_fresh or held is None:
            full = functional.pad(conv_states, (max(width - conv_states.shape[-1], 0), 0))
        else:
            full = torch.cat((held, conv_states), -1)
        self._store(("conv", state_idx), full[..., full.shape[-1] - width :])
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        """Store the state of a recurrence."""
        return self._store(("recurrent", state_idx), recurrent_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether the sequence has a state."""
        return not self._is_fresh

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return whether more than the last inputs are kept, which is never so."""
        return False

    def _store(self, key: StateKey, value: Tensor) -> Tensor:
        held = self.tensors.get(key)
        if held is None:
            held = self.tensors[key] = torch.empty_like(value, memory_format=torch.contiguous_format)
        held.copy_(value)
        return held


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive packed tokens of one sequence before a recurrent layer, with the sequence's states."""

    length: int
    states: RowStates
    after: Callable[[str], None] | None = None

    def went_in(self, kind: str) -> None:
        """Say that the tensors of a kind, "conv" or "recurrent", are those after the last token."""
        if self.after is not None:
            self.after(kind)

    def by_token(self) -> Iterator[tuple[RowStates, bool]]:
        """The states for each token, and whether it is the last one."""
        going_on = RowStates(self.states.tensors, is_fresh=False)
        for number in range(self.length):
            yield going_on if number else self.states, number + 1 == self.length
