"""Short convolutions and gated delta rules of the library's mixers, for all tokens of a packed step at once.

A mixer's own code runs once per step, with other functions in the place of the two that go along the tokens. They
compute each number of a token by the same operations in the same order whatever else is in the step: convolutions by
products with shifted rows, the recurrence token by token over the state of its sequence, in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bridle.model.state_pool import Span

_CONVOLUTION = "causal_conv1d_fn"
_RULES = frozenset({"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"})
_EPSILON = 1e-6  # of the length of keys and queries, in all of these rules


def packed_forward(module: nn.Module) -> Callable[..., Tensor] | None:
    """A mixer's forward function, for `PackedStates.compute`; None if it needs another recurrence than those here."""
    forward = inspect.unwrap(type(module).forward)
    names = {*forward.__code__.co_names}
    methods = (inspect.unwrap(value) for value in vars(type(module)).values() if callable(value))
    used = {name for method in methods if hasattr(method, "__code__") for name in method.__code__.co_names}
    if not {_CONVOLUTION, "update_conv_state"} <= names or ("update_recurrent_state" in used and not names & _RULES):
        return None
    has_known_activation = getattr(module, "activation", None) in (None, "silu", "swish")
    return forward if has_known_activation else None


class PackedStates(TorchFunctionMode):
    """The states of all sequences of a step in one layer, in the place of a mixer's cache."""

    def __init__(self, layer: int, spans: Sequence[Span]) -> None:
        super().__init__()
        self.layer, self.spans = layer, spans
        self.lengths = [span.length for span in spans]
        self.conv = 0, 0  # the number and the width of the convolution under way

    def compute(self, forward: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Call a mixer's forward function with the functions here in the place of its own."""
        others = {_CONVOLUTION: self.causal_conv1d, **dict.fromkeys(_RULES, self.gated_delta_rule)}
        scope = {**forward.__globals__, **others}
        same = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
        same.__kwdefaults__ = forward.__kwdefaults__
        with self:
            output: Tensor = same(*args, **kwargs)
        return output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute gates by operations whose last digits do not depend on a number's place among others."""
        other = _GATES.get(func)
        return other(args[0]) if other is not None and len(args) == 1 and not kwargs else func(*args, **(kwargs or {}))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: the convolution itself reads it."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: the recurrence itself reads it."""

    def update_conv_state(self, rows: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0) -> Tensor:
        """Note which convolution comes next."""
        self.conv = state_idx, conv_kernel_size
        return rows

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Do nothing: the recurrence has written it."""
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """False, so that no code for single tokens is taken."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return whether more than the last inputs are kept, which is never so."""
        return False

    def causal_conv1d(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        """Outputs [1, C, T] of the convolution with `weight` [C, K] over inputs [1, C, T]."""
        with torch._C.DisableTorchFunction():
            total = self._convolve(hidden_states[0].t(), weight.t().float())
            if bias is not None:
                total += bias.float()
            if activation is not None:
                total /= torch.exp(-total).add_(1)
            return total.to(hidden_states.dtype).t().unsqueeze(0)

    def _convolve(self, rows: Tensor, taps: Tensor) -> Tensor:
        """Sums [T, C] of rows [T, C] and those before them in their sequences, times taps [K, C]."""
        joined = [
            self._join(span, part) for span, part in zip(self.spans, torch.split(rows, self.lengths), strict=True)
        ]
        kept = len(joined[0]) - self.lengths[0]
        first = kept + 1 - len(taps)  # of the first token
        everything = torch.cat(joined).float()
        if len(joined) == 1:
            return _shifted_sum(lambda tap: everything.narrow(0, first + tap, len(rows)), taps)
        places = torch.arange(first, first + len(rows)) + kept * torch.repeat_interleave(torch.tensor(self.lengths))
        places = places.to(rows.device)
        return _shifted_sum(lambda tap: everything.index_select(0, places + tap), taps)

    def _join(self, span: Span, part: Tensor) -> Tensor:
        """The kept rows and those of `part`; the last ones are kept."""
        number, width = self.conv
        held = span.states.get_conv_state(self.layer, number)
        before = part.new_zeros(width, part.shape[1]) if held is None else held[0].t().to(part.dtype)
        joined = torch.cat((before, part))
        span.states.update_conv_state(joined[-len(before) :].t().unsqueeze(0), self.layer, number)
        span.went_in("conv")
        return joined

    def gated_delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Outputs [1, T, H, V] for queries and keys [1, T, G, K], values [1, T, H, V], logarithms of decays [1, T, H],
        or [1, T, H, K] for one decay per channel, and rates [1, T, H]."""
        with torch._C.DisableTorchFunction():
            copies = value.shape[2] // key.shape[2]
            queries, keys = (_unit_rows(part[0].float().repeat_interleave(copies, 1)) for part in (query, key))
            values, rates = value[0].float().unsqueeze(2), beta[0].float()[..., None, None]
            decay = g[0].float().exp().reshape(*rates.shape[:2], -1, 1)
            queries *= key.shape[-1] ** -0.5
            outputs = self._recur(decay, queries, keys, values, rates)
            return outputs.view(value.shape).to(query.dtype), outputs  # the second one stands for the states

    def _recur(self, decay: Tensor, query: Tensor, key: Tensor, value: Tensor, rate: Tensor) -> Tensor:
        """Outputs [T, H, 1, V] for decays [T, H, K or 1, 1], rates [T, H, 1, 1], and rows [T, H, 1, K or V]."""
        result = torch.empty_like(value, memory_format=torch.contiguous_format)
        inputs = (decay, query, key * rate, key.transpose(-1, -2), value * rate, result)
        tokens = zip(*(part.unbind() for part in inputs), strict=True)
        for span in self.spans:
            state = self._recurrent(span, key, value)
            for _ in range(span.length):
                _delta_step(state, *next(tokens))
            span.went_in("recurrent")
        return result

    def _recurrent(self, span: Span, key: Tensor, value: Tensor) -> Tensor:
        held = span.states.get_recurrent_state(self.layer)
        if held is None:
            shape = 1, key.shape[1], key.shape[-1], value.shape[-1]
            held = span.states.update_recurrent_state(value.new_zeros(shape), self.layer)
        return held[0]


def _delta_step(
    state: Tensor, decay: Tensor, query: Tensor, read: Tensor, write: Tensor, value: Tensor, out: Tensor
) -> None:
    """One token: the state [H, K, V] decays, what it holds for the key comes nearer to the value, then it is asked."""
    state.mul_(decay)
    state.baddbmm_(write, torch.baddbmm(value, read, state, alpha=-1))
    torch.bmm(query, state, out=out)


def _shifted_sum(rows: Callable[[int], Tensor], taps: Tensor) -> Tensor:
    total, product = rows(0) * taps[0], torch.empty_like(rows(0), memory_format=torch.contiguous_format)
    for number in range(1, len(taps)):  # in two operations: fused, last digits might depend on a number's place
        total += torch.mul(rows(number), taps[number], out=product)
    return total


def _unit_rows(rows: Tensor) -> Tensor:
    """[T, H, K] -> [T, H, 1, K], each of length one"""
    return (rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + _EPSILON)).unsqueeze(2)


def _sigmoid(rows: Tensor) -> Tensor:
    return torch.exp(-rows.float()).add_(1).reciprocal_().to(rows.dtype)


def _softplus(rows: Tensor) -> Tensor:
    floats = rows.float()
    return torch.where(floats > 20, floats, torch.exp(floats).log1p_()).to(rows.dtype)


_GATES = {torch.sigmoid: _sigmoid, Tensor.sigmoid: _sigmoid, functional.softplus: _softplus}
