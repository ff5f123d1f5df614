"""Plain torch for the sequential operations of recurrent layers: short convolutions, gated delta rules, and the scans
of Mamba and Mamba-2. The module has the same functions as `RecurrenceKernels`, for any device.

Tokens are computed one after the other. Each token updates the state of its sequence in place. A token's values come
from the same operations in the same order, whatever other sequences are in the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bridle.cpu_kernels.recurrence import Stretch

_EPSILON = 1e-6  # added to the squared length of keys and queries, in all delta rules


class PlainRecurrences:
    """Implements the methods of `RecurrenceKernels`, which documents the shapes, in plain torch."""

    def convolve(
        self, rows: Tensor, taps: Tensor, bias: Tensor | None, has_silu: bool, stretches: Sequence[Stretch], out: Tensor
    ) -> None:
        width, taps, out = stretches[0].state.shape[0], taps.t(), out[_covered(stretches)]
        joined = torch.cat([part for each in stretches for part in (_kept(each), _part(rows, each))])
        lengths = torch.tensor([each.length for each in stretches])
        first = torch.arange(len(out)) + width * torch.repeat_interleave(torch.arange(1, len(stretches) + 1), lengths)
        places = (first + 1 - len(taps)).to(rows.device)
        _shifted_sum(lambda tap: joined.index_select(0, places + tap), taps, out)
        end = 0
        for each in stretches:
            end += width + each.length
            each.state.copy_(joined[end - width : end])
        if bias is not None:
            out += bias
        if has_silu:
            out /= torch.exp(-out).add_(1)

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        rate: Tensor,
        stretches: Sequence[Stretch],
        out: Tensor,
    ) -> None:
        copies, rates = value.shape[1] // key.shape[1], rate[..., None, None]
        queries, keys = (_unit_rows(part.repeat_interleave(copies, 1)) for part in (query, key))
        queries *= key.shape[-1] ** -0.5
        values, decays = value.unsqueeze(2), decay.exp().reshape(*rates.shape[:2], -1, 1)
        inputs = (decays, queries, keys * rates, keys.transpose(-1, -2), values * rates, out.unsqueeze(2))
        for state, (factor, asked, read, written, aim, told) in _tokens(stretches, *inputs):
            state.mul_(factor)
            state.baddbmm_(written, torch.baddbmm(aim, read, state, alpha=-1))
            torch.bmm(asked, state, out=told)

    def state_space(
        self,
        inputs: Tensor,
        step: Tensor,
        rate: Tensor,
        write: Tensor,
        read: Tensor,
        skip: Tensor | None,
        stretches: Sequence[Stretch],
        out: Tensor,
    ) -> None:
        copies = inputs.shape[1] // write.shape[1]
        writes, reads = (part.repeat_interleave(copies, 1) for part in (write, read))
        decays, added = torch.exp(step * rate)[..., None, None], (inputs * step.unsqueeze(-1)).unsqueeze(-1)
        parts = (decays, added, writes.unsqueeze(2), reads.unsqueeze(-1), out.unsqueeze(-1))
        for state, (factor, rows, written, asked, told) in _tokens(stretches, *parts):
            state.mul_(factor).baddbmm_(rows, written)
            torch.bmm(state, asked, out=told)
        if skip is not None:
            part = _covered(stretches)
            out[part] += inputs[part] * skip.unsqueeze(-1)

    def scan(
        self,
        inputs: Tensor,
        step: Tensor,
        rate: Tensor,
        write: Tensor,
        read: Tensor,
        skip: Tensor | None,
        gate: Tensor | None,
        stretches: Sequence[Stretch],
        out: Tensor,
    ) -> None:
        steps, added = step.unsqueeze(-1), (inputs * step).unsqueeze(-1)
        for state, (length, rows, written, asked, told) in _tokens(stretches, steps, added, write, read, out):
            state.mul_(torch.exp(length * rate)).add_(rows * written)
            torch.sum(state * asked, -1, out=told)
        part = _covered(stretches)
        if skip is not None:
            out[part] += inputs[part] * skip
        if gate is not None:
            out[part] *= gate[part] / torch.exp(-gate[part]).add_(1)


def _covered(stretches: Sequence[Stretch]) -> slice:
    """Return the slice of rows that consecutive stretches of tokens cover."""
    return slice(stretches[0].offset, stretches[-1].offset + stretches[-1].length)


def _part(rows: Tensor, each: Stretch) -> Tensor:
    return rows[each.offset : each.offset + each.length]


def _kept(each: Stretch) -> Tensor:
    return torch.zeros_like(each.state) if each.is_fresh else each.state


def _tokens(stretches: Sequence[Stretch], *inputs: Tensor) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """Yield the sequence's state and the inputs for each token of the stretches."""
    for each in stretches:
        if each.is_fresh:
            each.state.zero_()
        for parts in zip(*(_part(part, each).unbind() for part in inputs), strict=True):
            yield each.state, parts


def _shifted_sum(rows: Callable[[int], Tensor], taps: Tensor, out: Tensor) -> None:
    torch.mul(rows(0), taps[0], out=out)
    for number in range(1, len(taps)):  # in two operations: in a fused one, last digits might depend on a value's place
        out += rows(number) * taps[number]


def _unit_rows(rows: Tensor) -> Tensor:
    """Scale each row to length 1: [T, H, K] -> [T, H, 1, K]."""
    return (rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + _EPSILON)).unsqueeze(2)
