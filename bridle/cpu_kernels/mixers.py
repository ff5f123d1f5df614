"""Calls the C kernels for the mixers of recurrent layers, which replace attention: short convolutions, gated delta
nets, Mamba-2 and Mamba. The kernels compute a whole mixer in one call, over the states of all sequences of a step. This
module checks the arguments of the C functions. The fields of this module's structs have the order of sources/mixer.h.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from ctypes import POINTER, c_float, c_int, c_void_p
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bridle.cpu_kernels.kernels import CMatrix, Matrix, check_tensor, require
from bridle.cpu_kernels.recurrence import MAX_SIZE, MAX_TAPS

#: Codes of the kinds in sources/mixer.h.
KINDS = {"short_convolution": 0, "delta_net": 1, "mamba2": 2, "mamba": 3}
_WORDS_OF_A_STRETCH = 4


class CMixer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("taps", "bias", "shift", "fall", "skip", "norm")),
        ("inner", POINTER(CMatrix)),
        *((name, c_void_p) for name in ("places", "runs", "inputs", "states")),
        *((name, c_int) for name in ("kind", "channels", "num_taps", "width", "groups", "heads", "size")),
        *((name, c_int) for name in ("columns", "num_runs")),
        *((name, c_float) for name in ("eps", "least", "most")),
    )


class CStateRows(ctypes.Structure):
    _fields_ = (*((name, c_void_p) for name in ("stretches", "groups", "copies", "table")), ("num_groups", c_int))


class MixerStates(NamedTuple):
    """The recurrent states of a layer in all slots."""

    inputs: Tensor  # [slots, width, channels]: the last inputs of the convolution
    states: Tensor | None  # [slots, heads, ...]

    @property
    def num_slots(self) -> int:
        return self.inputs.shape[0]


@dataclass(frozen=True, slots=True)
class Mixer:
    """The weights of a mixer, in float32. A state has a matrix of `size` by `columns` values for each of `heads`. Each
    of `groups` groups of heads shares its keys and queries. A short convolution has no heads. In Mamba, each channel is
    a head with one column."""

    kind: str
    taps: Tensor  # [channels, taps]
    bias: Tensor | None  # [channels]
    groups: int = 0
    heads: int = 0
    size: int = 0
    columns: int = 0
    shift: Tensor | None = None  # [heads], like all of these except the norm
    fall: Tensor | None = None  # [heads, size] with Mamba
    skip: Tensor | None = None
    norm: Tensor | None = None  # [columns], or [heads * columns] with Mamba-2, or of Mamba's parameters
    inner: Sequence[Matrix] = ()  # with Mamba: channels -> parameters, and those of steps -> steps
    places: Tensor | None = None  # [heads] int32, order of the heads' outputs of a delta net
    runs: Tensor | None = None  # [n, 2] int32: start and length of stretches of a row's inputs, in order
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
        """Return the mixer's number of inputs per token, which are the outputs of the layer's first product."""
        if self.kind == "short_convolution":
            return 3 * self.channels
        if self.kind == "mamba":
            return 2 * self.channels
        return self.channels + self.num_outputs + self.heads * (2 if self.kind == "delta_net" else 1)

    @property
    def num_mixed(self) -> int:
        """Return how many values of scratch memory a token needs in addition to its inputs and outputs."""
        return self.channels if self.runs is None else self.num_inputs

    @property
    def num_parameters(self) -> int:
        """Return the number of values per token from which the mixer computes time steps and other parameters."""
        return self.inner[0].outputs if self.inner else self.heads

    def c(self, pool: MixerStates) -> CMixer:
        """Return the C struct of the mixer over the states of `pool`, after a check of all sizes. Raises
        `InternalError` if a size is wrong."""
        (channels, num_taps), (slots, width) = self.taps.shape, pool.inputs.shape[:2]
        require(0 < num_taps <= min(MAX_TAPS, width + 1), f"{num_taps} taps, {width} kept")
        parts = [(self.taps, channels * num_taps), (self.bias, channels), (pool.inputs, slots * width * channels)]
        if self.kind == "mamba":
            parts += self._scan_parts(pool)
        elif self.kind != "short_convolution":
            parts += self._state_parts(pool)
        for tensor, size in parts:
            if tensor is not None:
                check_tensor(tensor, torch.float32, size, "a part of a mixer")
        self._check_runs()
        first = (self.taps, self.bias, self.shift, self.fall, self.skip, self.norm)
        return CMixer(
            *_addresses(first),
            (CMatrix * len(self.inner))(*(each.c for each in self.inner)) if self.inner else None,
            *_addresses((self.places, self.runs, *pool)),
            *(KINDS[self.kind], channels, num_taps, width, self.groups, self.heads, self.size, self.columns),
            *(0 if self.runs is None else len(self.runs), self.eps, *self.limits),
        )

    def _scan_parts(self, pool: MixerStates) -> list[tuple[Tensor | None, int]]:
        channels, size = self.channels, self.size
        require(self.heads == channels and self.columns == 1 and size > 0, f"{self.heads} heads of {channels} channels")
        require(len(self.inner) == 2 and None not in (self.fall, pool.states), "a mixer without a part")
        first, second = self.inner
        sizes = first.given, first.outputs, second.outputs
        require(sizes == (channels, second.given + 2 * size, channels), f"products of {sizes} in a mixer")
        states = (pool.states, pool.num_slots * channels * size)
        return [(self.fall, channels * size), (self.skip, channels), (self.norm, first.outputs), states]

    def _check_runs(self) -> None:
        if self.runs is not None:
            check_tensor(self.runs, torch.int32, 2 * len(self.runs), "runs of inputs")
            found = [number for start, length in self.runs.tolist() for number in range(start, start + length)]
            require(sorted(found) == [*range(self.num_inputs)], "runs that are no order of the inputs")

    def _state_parts(self, pool: MixerStates) -> list[tuple[Tensor | None, int]]:
        heads, size, columns = self.heads, self.size, self.columns
        require(0 < size <= MAX_SIZE and self.groups > 0 and heads % self.groups == 0, f"{heads} heads of {size}")
        keys = 2 * self.groups * size
        require(self.channels == keys + heads * columns, f"{self.channels} channels for {heads} heads")
        needed = (self.shift, self.fall, pool.states, self.norm if self.kind == "delta_net" else self.shift)
        require(None not in needed, "a mixer without a part")
        norm = columns if self.kind == "delta_net" else heads * columns
        per_head = [(part, heads) for part in (self.shift, self.fall, self.skip)]
        if self.places is not None:
            check_tensor(self.places, torch.int32, heads, "places of heads")
            require(sorted(self.places.tolist()) == [*range(heads)], "places of heads that are no order")
        return [*per_head, (self.norm, norm), (pool.states, pool.num_slots * heads * size * columns)]


def _addresses(tensors: Sequence[Tensor | None]) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


#: Consecutive packed tokens of a sequence: their number, whether it has no state yet, the slot of its state, and the
#: slots that get a copy of the state after these tokens.
StateSpan = tuple[int, bool, int, Sequence[int]]


class StateRows:
    """The token spans of a step, in the order of their tokens, as input of the kernels. Spans form groups with at most
    one span per sequence. Saved states are copied after each group."""

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
