"""Kernels for the sequential operations of recurrent layers, with checked arguments.

Rows are float32. Each row is contiguous, with any stride between rows. The fields of this module's structs have the
order of sources/recurrent.h.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from bridle.cpu_kernels.kernels import Kernels, check_tensor, require
from bridle.cpu_kernels.threads import is_parallel

MAX_TAPS, MAX_SIZE = 8, 256
_MAX_TOKENS = 1 << 20


class Stretch(NamedTuple):
    """Consecutive tokens of one sequence, from row `offset` on, with the sequence's state, which is written in place.
    If `is_fresh`, the sequence starts with these tokens, and the state's old contents are ignored."""

    offset: int
    length: int
    state: Tensor
    is_fresh: bool


class CConvolution(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("rows", "taps", "bias", "out", "stretches")),
        ("stride", c_int64),
        *((name, c_int) for name in ("count", "channels", "num_taps", "width", "has_silu")),
    )


class CDeltaRule(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value", "decay", "rate", "out", "stretches")),
        *((name, c_void_p) for name in ("shift", "fall", "norm", "gate", "places")),  # of whole layers, see mixers.py
        *((f"{name}_stride", c_int64) for name in ("query", "key", "value", "decay", "rate", "gate")),
        *((name, c_int) for name in ("count", "groups", "heads", "size", "columns", "decays")),
        ("eps", c_float),
    )


class CStateSpace(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("input", "step", "rate", "write", "read", "skip", "out", "stretches")),
        *((name, c_int64) for name in ("input_stride", "write_stride", "read_stride")),
        *((name, c_int) for name in ("count", "groups", "heads", "rows", "size")),
    )


class CScan(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("input", "step", "rate", "write", "read", "skip", "gate", "out", "stretches")),
        *((f"{name}_stride", c_int64) for name in ("input", "step", "write", "read", "gate")),
        *((name, c_int) for name in ("count", "channels", "size")),
    )


class RecurrenceKernels:
    """Calls the C functions of sources/recurrent.h with checked arguments. All stretches of tokens in a call must
    belong to different sequences."""

    def __init__(self, found: Kernels) -> None:
        self._convolve = found.function("bridle_convolve", POINTER(CConvolution), c_int)
        self._delta_rule = found.function("bridle_delta_rule", POINTER(CDeltaRule), c_int)
        self._state_space = found.function("bridle_state_space", POINTER(CStateSpace), c_int)
        self._scan = found.function("bridle_scan", POINTER(CScan), c_int)

    def convolve(
        self,
        rows: Tensor,  # [T, C]
        taps: Tensor,  # [C, K]
        bias: Tensor | None,  # [C]
        has_silu: bool,
        stretches: Sequence[Stretch],  # states [W, C], W >= K - 1
        out: Tensor,  # [T, C]
    ) -> None:
        """Convolve the rows: write the sum of each row and the rows before it, each multiplied by its tap, to `out`.
        The state of a sequence keeps the sequence's last rows."""
        (channels, num_taps), width = taps.shape, stretches[0].state.shape[0]
        require(
            0 < num_taps <= min(MAX_TAPS, width + 1) and rows.shape[1] == channels, f"{num_taps} taps, {width} kept"
        )
        table = _table(stretches, rows.shape[0], width * channels)
        call = CConvolution(
            *(_rows(rows), _dense(taps, channels * num_taps), None if bias is None else _dense(bias, channels)),
            *(_dense(out, rows.shape[0] * channels), table.buffer_info()[0]),
            *(rows.stride(0), len(stretches), channels, num_taps, width, has_silu),
        )
        self._convolve(call, is_parallel())

    def delta_rule(
        self,
        query: Tensor,  # [T, G, K]
        key: Tensor,
        value: Tensor,  # [T, H, V]
        decay: Tensor,  # [T, H] or [T, H, K], logarithms
        rate: Tensor,  # [T, H]
        stretches: Sequence[Stretch],  # states [H, K, V]
        out: Tensor,  # [T, H, V]
    ) -> None:
        """Update the states by the delta rule, which moves a state's result for each key closer to the key's value.
        Then write the results of the updated states for the queries to `out`."""
        (tokens, groups, size), (_, heads, columns) = key.shape, value.shape
        decays = decay.numel() // max(tokens * heads, 1)
        require(0 < size <= MAX_SIZE and heads % groups == 0 and decays in (1, size), f"keys of {size}, {heads} heads")
        require(query.shape == key.shape and value.shape[0] == tokens, f"{tuple(query.shape)} queries")
        table = _table(stretches, tokens, heads * size * columns)
        call = CDeltaRule(
            *(_rows(query), _rows(key), _rows(value)),
            *(_dense(decay, tokens * heads * decays), _dense(rate, tokens * heads)),
            *(_dense(out, tokens * heads * columns), table.buffer_info()[0], *[None] * 5),
            *(query.stride(0), key.stride(0), value.stride(0), heads * decays, heads, 0),
            *(len(stretches), groups, heads, size, columns, decays),
        )
        self._delta_rule(call, is_parallel())

    def state_space(
        self,
        inputs: Tensor,  # [T, H, P]
        step: Tensor,  # [T, H]
        rate: Tensor,  # [H]
        write: Tensor,  # [T, G, N]
        read: Tensor,
        skip: Tensor | None,  # [H]
        stretches: Sequence[Stretch],  # states [H, P, N]
        out: Tensor,  # [T, H, P]
    ) -> None:
        """Let the states decay, and add the inputs times `write`. Then write the product of the updated states and
        `read` to `out`."""
        (tokens, heads, rows), (_, groups, size) = inputs.shape, write.shape
        require(heads % groups == 0 and write.shape == read.shape and write.shape[0] == tokens, f"{heads} heads")
        table = _table(stretches, tokens, heads * rows * size)
        call = CStateSpace(
            *(_rows(inputs), _dense(step, tokens * heads), _dense(rate, heads), _rows(write), _rows(read)),
            *(None if skip is None else _dense(skip, heads), _dense(out, tokens * heads * rows)),
            *(table.buffer_info()[0], inputs.stride(0), write.stride(0), read.stride(0)),
            *(len(stretches), groups, heads, rows, size),
        )
        self._state_space(call, is_parallel())

    def scan(
        self,
        inputs: Tensor,  # [T, C]
        step: Tensor,
        rate: Tensor,  # [C, N]
        write: Tensor,  # [T, N]
        read: Tensor,
        skip: Tensor | None,  # [C]
        gate: Tensor | None,  # [T, C]
        stretches: Sequence[Stretch],  # states [C, N]
        out: Tensor,  # [T, C]
    ) -> None:
        """Compute the same as `state_space`, but with a separate decay rate for each value of a state. The results are
        multiplied by the SiLU of `gate`."""
        (tokens, channels), size = inputs.shape, rate.shape[1]
        require(step.shape == inputs.shape and write.shape == read.shape == (tokens, size), f"{channels} channels")
        require(gate is None or gate.shape == inputs.shape, "a gate of another shape")
        table = _table(stretches, tokens, channels * size)
        call = CScan(
            *(_rows(inputs), _rows(step), _dense(rate, channels * size), _rows(write), _rows(read)),
            *(None if skip is None else _dense(skip, channels), None if gate is None else _rows(gate)),
            *(_dense(out, tokens * channels), table.buffer_info()[0]),
            *(inputs.stride(0), step.stride(0), write.stride(0), read.stride(0), 0 if gate is None else gate.stride(0)),
            *(len(stretches), channels, size),
        )
        self._scan(call, is_parallel())


def _table(stretches: Sequence[Stretch], tokens: int, size: int) -> array[int]:
    """Return the stretches of tokens as an argument for the C kernels. Raises `InternalError` if a stretch exceeds
    `tokens` rows, or if a state does not have `size` values."""
    require(0 < tokens < _MAX_TOKENS, f"{tokens} tokens")
    fields = array("q")
    for offset, length, state, is_fresh in stretches:
        require(0 <= offset < offset + length <= tokens, f"{length} of {tokens} tokens from {offset} on")
        fields.extend((offset, length, is_fresh, _dense(state, size)))
    return fields


def _dense(tensor: Tensor, size: int) -> int:
    check_tensor(tensor, torch.float32, size, "a part of a recurrence")
    return tensor.data_ptr()


def _rows(rows: Tensor) -> int:
    """Return the address of rows [T, ...], each of which must be contiguous."""
    size, is_dense = 1, rows.stride(0) >= 0
    for length, stride in zip(rows.shape[:0:-1], rows.stride()[:0:-1], strict=True):
        is_dense = is_dense and (stride == size or length == 1)
        size *= length
    require(
        rows.device.type == "cpu" and rows.dtype is torch.float32 and is_dense, f"rows with strides {rows.stride()}"
    )
    return rows.data_ptr()
