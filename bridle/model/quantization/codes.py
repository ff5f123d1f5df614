"""Packed weights in the order that the CUDA kernels read: `Codes` of 2, 4 or 8 bits. Groups of inputs with a common
scale may have any length, and inputs may be in any order. Inputs are laid out in *slots*. Each group has its own slots,
whose number is a multiple of `RUN`. So the slots of a run of `RUN` slots share their scales. A word of 32 bits holds
one slot of each of several runs. So a kernel gets adjacent slots from one load and one shift. If each group consists of
consecutive inputs, slot i is input i. If a group's inputs are not consecutive, `order` has the input of each slot. A
slot without an input counts as zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bridle.model.quantization.weights import Grouped

#: Slots that one product of a kernel takes: the minimum that tensor cores multiply.
RUN = 16


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight [out, in]. `words` are int32 [slots * bits / 32, out], and `scales` [groups, out]. Zero points are uint8
    [groups, out], or one number for the whole weight. `order` is int32 [slots] with the input of each slot (-1: none),
    or None if slot i is input i."""

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    zero: int
    bits: int
    is_float: bool
    group_slots: int
    num_inputs: int

    @property
    def shape(self) -> tuple[int, int]:
        """Return (out, in)."""
        return self.words.shape[1], self.num_inputs

    @property
    def form(self) -> tuple[int, bool, bool, bool, torch.dtype]:
        """Return the properties that kernels are compiled for. Codes with equal properties share compiled kernels."""
        return self.bits, self.is_float, self.zeros is not None, self.order is not None, self.scales.dtype

    def number(self) -> Tensor:
        """Return the decoded weight, float32 [out, in]."""
        per = 32 // self.bits
        words = self.words.view(-1, 1, RUN, self.words.shape[1])
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32, device=words.device).view(1, per, 1, 1)
        values = ((words >> shifts) & ((1 << self.bits) - 1)).flatten(0, 2)  # [slots, out]
        group = (torch.arange(values.shape[0], device=words.device) // self.group_slots).clamp_max(
            self.scales.shape[0] - 1
        )
        if self.is_float:
            number = values.to(torch.uint8).view(torch.float8_e4m3fn).float()
        else:
            number = (values - (self.zero if self.zeros is None else self.zeros[group].int())).float()
        number *= self.scales.float()[group]
        if self.order is None:
            return number[: self.num_inputs].t().contiguous()
        is_input = self.order >= 0
        out = number.new_zeros(self.num_inputs, number.shape[1])
        out[self.order[is_input].long()] = number[is_input]
        return out.t().contiguous()


def make_codes(grouped: Grouped) -> Codes:
    """Convert a weight to codes with the same values. Raises `ValueError` for a value type that codes do not
    support."""
    values, zeros = _as_bytes(grouped)
    num_inputs, num_groups = values.shape[1], grouped.scales.shape[1]
    order, group_slots = _slots(grouped.index, num_groups)
    num_slots = num_inputs if order is None else order.shape[0]
    block = RUN * 32 // grouped.bits
    padded = -(-num_slots // block) * block
    laid = values.new_zeros(padded, values.shape[0])  # [slots, out]
    if order is None:
        laid[:num_inputs] = values.t()
    else:
        order = torch.nn.functional.pad(order, (0, padded - num_slots), value=-1)
        is_input = order >= 0
        laid[is_input] = values.t()[order[is_input].long()]
    is_one = zeros is None or bool((zeros == zeros[0, 0]).all())
    return Codes(
        words=_pack(laid, grouped.bits),
        scales=grouped.scales.t().contiguous(),
        zeros=None if is_one or zeros is None else zeros.t().to(torch.uint8).contiguous(),
        order=order,
        zero=0 if zeros is None or not is_one else int(zeros[0, 0]),
        bits=grouped.bits,
        is_float=grouped.values.dtype is torch.float8_e4m3fn,
        group_slots=group_slots,
        num_inputs=num_inputs,
    )


def _as_bytes(grouped: Grouped) -> tuple[Tensor, Tensor | None]:
    """Return the weight's values as uint8 codes, and the codes' zero points."""
    values, zeros = grouped.values, grouped.zeros
    if values.dtype is torch.int8:
        moved = torch.full_like(grouped.scales, 128, dtype=torch.int16)
        return (values.to(torch.int16) + 128).to(torch.uint8), moved if zeros is None else zeros + 128
    if values.dtype is torch.uint8:
        return values, zeros
    if values.dtype is torch.float8_e4m3fn and zeros is None:
        return values.view(torch.uint8), None
    raise ValueError(f"weights of type {values.dtype} cannot be stored as codes")


def _slots(index: Tensor, num_groups: int) -> tuple[Tensor | None, int]:
    """Return the input of each slot (None: slot i is input i), and the number of slots per group. `index` is the group
    of each input."""
    num_inputs = index.shape[0]
    even = -(-num_inputs // num_groups)
    for size in {even, int(index.bincount().max())}:
        plain = torch.arange(num_inputs, device=index.device) // size
        if (size % RUN == 0 or num_groups == 1) and torch.equal(index, plain):
            return None, -(-size // RUN) * RUN
    counts = torch.bincount(index, minlength=num_groups)
    group_slots = -(-int(counts.max()) // RUN) * RUN
    inputs = index.argsort(stable=True)
    place = torch.arange(num_inputs, device=index.device) - (counts.cumsum(0) - counts)[index[inputs]]
    order = torch.full((num_groups * group_slots,), -1, dtype=torch.int32, device=index.device)
    order[index[inputs] * group_slots + place] = inputs.to(torch.int32)
    return order, group_slots


def _pack(laid: Tensor, bits: int) -> Tensor:
    """Pack values: uint8 [slots, out] -> int32 [slots * bits / 32, out]"""
    per = 32 // bits
    runs = laid.view(-1, per, RUN, laid.shape[1])
    words = torch.zeros(runs.shape[0], RUN, laid.shape[1], dtype=torch.int32, device=laid.device)
    for part in range(per):
        words |= runs[:, part].to(torch.int32) << (bits * part)
    return words.flatten(0, 1)


def join_codes(parts: list[Codes]) -> Codes | None:
    """Join several weights with the same inputs into one, by concatenating outputs. Return None if the layouts of the
    weights differ."""
    first = parts[0]
    if any(part.form != first.form or part.group_slots != first.group_slots for part in parts):
        return None
    if any(part.zero != first.zero or part.scales.shape[0] != first.scales.shape[0] for part in parts):
        return None
    if first.order is not None and not all(torch.equal(first.order, part.order) for part in parts):  # type: ignore[arg-type]
        return None
    zeros = None if first.zeros is None else torch.cat([part.zeros for part in parts], 1)  # type: ignore[misc]
    words, scales = (torch.cat([getattr(part, name) for part in parts], 1) for name in ("words", "scales"))
    return replace(first, words=words, scales=scales, zeros=zeros)
