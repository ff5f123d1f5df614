"""Mixers of recurrent layers, which stand in the place of attention: short convolutions, gated delta nets and Mamba-2.
The kernels compute each whole, over the states of all sequences of a step. Arguments are checked here.

The order of the fields is that of sources/mixer.h.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bridle.cpu_kernels.kernels import check_tensor, require
from bridle.cpu_kernels.recurrence import MAX_SIZE, MAX_TAPS

#: Numbers of the kinds in sources/mixer.h.
KINDS = {"short_convolution": 0, "delta_net": 1, "mamba2": 2}
_WORDS_OF_A_STRETCH = 4


class CMixer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("taps", "bias", "shift", "fall", "skip", "norm", "places", "inputs", "states")),
        *((name, c_int) for name in ("kind", "channels", "num_taps", "width", "groups", "heads", "size", "columns")),
        *((name, c_float) for name in ("eps", "least", "most")),
    )


class CStateRows(ctypes.Structure):
    _fields_ = (*((name, c_void_p) for name in ("stretches", "groups", "copies", "table")), ("num_groups", c_int))


class MixerStates(NamedTuple):
    """The states of a layer in all slots."""

    inputs: Tensor  # [slots, width, channels]: the last inputs of the convolution
    states: Tensor | None  # [slots, heads, ...]

    @property
    def num_slots(self) -> int:
        return self.inputs.shape[0]


@dataclass(frozen=True, slots=True)
class Mixer:
    """The weights of a mixer, in float32. A state has a matrix of `size` by `columns` numbers for each of `heads`; keys
    and queries belong to `groups` of heads. A short convolution has no heads."""

    kind: str
    taps: Tensor  # [channels, taps]
    bias: Tensor | None  # [channels]
    groups: int = 0
    heads: int = 0
    size: int = 0
    columns: int = 0
    shift: Tensor | None = None  # [heads], as all but the norm
    fall: Tensor | None = None
    skip: Tensor | None = None
    norm: Tensor | None = None  # [columns], or [heads * columns] with Mamba-2
    places: Tensor | None = None  # [heads] int32, of the heads' outputs of a delta net
    eps: float = 0.0
    limits: tuple[float, float] = (0.0, float("inf"))  # of steps

    @property
    def channels(self) -> int:
        return self.taps.shape[0]

    @property
    def num_outputs(self) -> int:
        return self.heads * self.columns or self.channels

    @property
    def num_inputs(self) -> int:
        """The numbers that the first product gives for a token."""
        if self.kind == "short_convolution":
            return 3 * self.channels
        return self.channels + self.num_outputs + self.heads * (2 if self.kind == "delta_net" else 1)

    def c(self, pool: MixerStates) -> CMixer:
        """The mixer over the states of `pool`, once all sizes are right. Raises `InternalError` if they are not."""
        (channels, num_taps), (slots, width) = self.taps.shape, pool.inputs.shape[:2]
        require(0 < num_taps <= min(MAX_TAPS, width + 1), f"{num_taps} taps, {width} kept")
        parts = [(self.taps, channels * num_taps), (self.bias, channels), (pool.inputs, slots * width * channels)]
        if self.kind != "short_convolution":
            parts += self._state_parts(pool)
        for tensor, size in parts:
            if tensor is not None:
                check_tensor(tensor, torch.float32, size, "a part of a mixer")
        tensors = (self.taps, self.bias, self.shift, self.fall, self.skip, self.norm, self.places, *pool)
        return CMixer(
            *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
            *(KINDS[self.kind], channels, num_taps, width, self.groups, self.heads, self.size, self.columns),
            *(self.eps, *self.limits),
        )

    def _state_parts(self, pool: MixerStates) -> list[tuple[Tensor | None, int]]:
        heads, size, columns = self.heads, self.size, self.columns
        require(0 < size <= MAX_SIZE and self.groups > 0 and heads % self.groups == 0, f"{heads} heads of {size}")
        keys = 2 * self.groups * size
        require(self.channels == keys + heads * columns, f"{self.channels} channels for {heads} heads")
        require(None not in (self.shift, self.fall, self.norm, pool.states), "a mixer without a part")
        norm = columns if self.kind == "delta_net" else heads * columns
        per_head = [(part, heads) for part in (self.shift, self.fall, self.skip)]
        if self.places is not None:
            check_tensor(self.places, torch.int32, heads, "places of heads")
            require(sorted(self.places.tolist()) == [*range(heads)], "places of heads that are no order")
        return [*per_head, (self.norm, norm), (pool.states, pool.num_slots * heads * size * columns)]


#: Consecutive packed tokens of a sequence: their number, whether it has no state yet, the slot of its state, and the
#: slots that get a copy of the state after them.
StateSpan = tuple[int, bool, int, Sequence[int]]


class StateRows:
    """The spans of a step in the order of their tokens, as kernels take them: in groups with one span of a sequence at
    most. States are copied after each group."""

    def __init__(self, spans: Iterable[StateSpan], num_slots: int) -> None:
        self._stretches, self._copies, self._groups = array("q"), array("q"), array("q")
        seen: set[int] = set()
        offset = largest = 0
        for length, is_fresh, slot, targets in spans:
            for number in (slot, *targets):
                require(0 <= number < num_slots, f"state {number} of {num_slots}")
            if slot in seen or not self._groups:
                seen.clear()
                self._groups.extend((0, 0))
            require(length > 0, f"{length} tokens")
            seen.add(slot)
            self._stretches.extend((offset, length, is_fresh, slot))
            self._groups[-2] += 1
            for target in targets:
                self._copies.extend((slot, target))
                self._groups[-1] += 1
            offset += length
            largest = max(largest, self._groups[-2])
        self.num_tokens, self.num_slots = offset, num_slots
        self._table = array("q", bytes(8 * _WORDS_OF_A_STRETCH * largest))

    @property
    def c(self) -> CStateRows:
        parts = (self._stretches, self._groups, self._copies, self._table)
        return CStateRows(*(part.buffer_info()[0] for part in parts), len(self._groups) // 2)
