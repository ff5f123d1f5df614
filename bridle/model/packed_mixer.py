"""Runs recurrent mixers of transformers over packed steps. A mixer's own code runs once per step, for all tokens. The
functions that process tokens sequentially are replaced: short convolutions, gated delta rules, and the scans of Mamba
and Mamba-2. On a CPU the replacements are C kernels. MiniMax-01's lightning attention is a scan of Mamba-2 with fixed
decays.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bridle.cpu_kernels.library import recurrences
from bridle.cpu_kernels.recurrence import Stretch
from bridle.model.state_pool import Span, StateKey

_CONVOLUTION = "causal_conv1d_fn"
_RULES = frozenset({"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"})
_STATE_SPACE, _SCAN = "mamba2_chunk_scan", "mamba_selective_scan"
_ACTIVATIONS = (None, "silu", "swish")
_KNOWN = _RULES | {_STATE_SPACE, _SCAN}


def packed_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return a mixer's forward function, for `PackedMixer`; None if this module does not support the mixer's
    recurrence."""
    forward = inspect.unwrap(type(module).forward)
    names = {*forward.__code__.co_names}
    if "set_linear_cache" in names:
        return _lightning
    methods = (inspect.unwrap(value) for value in vars(type(module)).values() if callable(value))
    used = {name for method in methods if hasattr(method, "__code__") for name in method.__code__.co_names}
    is_known = {_CONVOLUTION, "update_conv_state"} <= names and ("update_recurrent_state" not in used or names & _KNOWN)
    return forward if is_known and getattr(module, "activation", None) in _ACTIVATIONS else None


class PackedMixer:
    """A mixer whose forward function uses the sequential functions of `PackedStates`."""

    def __init__(self, module: nn.Module, layer: int, forward: Any) -> None:
        self._states = states = PackedStates(layer)
        others = {_CONVOLUTION: states.causal_conv1d, **dict.fromkeys(_RULES, states.gated_delta_rule)}
        others |= {_STATE_SPACE: states.state_space, _SCAN: states.scan}
        scope = {**forward.__globals__, **others}
        self._forward = FunctionType(
            forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__
        )
        self._forward.__kwdefaults__ = forward.__kwdefaults__
        self._module = _Scanning(module) if hasattr(module, "dt_proj") else module

    def __call__(self, spans: Sequence[Span], cache: str, **inputs: Tensor) -> Tensor:
        """Return the mixer's outputs for the packed tokens of `spans`. `inputs` are the mixer's arguments, and `cache`
        is the name of its cache argument."""
        self._states.spans, self._states.num_scans = spans, 0
        with self._states:
            output: Tensor = self._forward(self._module, **{**inputs, cache: self._states})
        return output


class _Scanning:
    """Wraps a Mamba mixer whose code multiplies by the weight of `dt_proj`. The wrapper calls the layer `dt_proj`
    itself instead, so that quantized weights and adapters work."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.dt_proj = _Product(module.dt_proj)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Product:
    bias = None  # the product includes it

    def __init__(self, layer: nn.Module) -> None:
        self._layer, self.weight = layer, self

    def __matmul__(self, columns: Tensor) -> Tensor:
        product: Tensor = self._layer(columns.transpose(1, 2))
        return product.transpose(1, 2)


class PackedStates(TorchFunctionMode):
    """The recurrent states of a step's sequences in one layer. A mixer gets this object in the place of its cache."""

    def __init__(self, layer: int, spans: Sequence[Span] = ()) -> None:
        super().__init__()
        self.layer, self.spans = layer, spans
        self.conv = 0, 0  # number and width of the current convolution
        self.num_scans = 0  # of this pass: some mixers scan each head separately

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace torch functions in the mixer's gates by operations whose rounding does not depend on a value's
        position in a tensor."""
        other = _GATES.get(func)
        return other(args[0]) if other is not None and len(args) == 1 and not kwargs else func(*args, **(kwargs or {}))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, because the convolution itself reads the state."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, because the recurrence itself reads the state."""

    def update_conv_state(self, rows: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0) -> Tensor:
        """Record the arguments for the next call of the convolution."""
        self.conv = state_idx, conv_kernel_size
        return rows

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Do nothing, because the recurrence has already written the state."""
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return False, so that the mixer does not use its code for single tokens."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False, because a state keeps only the last inputs of its sequence."""
        return False

    def causal_conv1d(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        """Return outputs [1, C, T] of the convolution with `weight` [C, K] over inputs [1, C, T]. A state [W, C] holds
        the last inputs."""
        with torch._C.DisableTorchFunction():
            rows, (number, width) = _columns(hidden_states), self.conv
            out, key = torch.empty(rows.shape, device=rows.device), ("conv", number)
            compute = recurrences(rows.device, hidden_states.dtype).convolve
            taps = _floats(weight)
            for stretches in self.groups(key, (width, len(taps)), rows.device, hidden_states.dtype):
                compute(rows, taps, _optional(bias), activation is not None, stretches, out)
            return out.to(hidden_states.dtype).t().unsqueeze(0)

    def gated_delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Return outputs [1, T, H, V] of the gated delta rule. Inputs are queries and keys [1, T, G, K], values [1, T,
        H, V] and rates `beta` [1, T, H]. `g`, the logarithms of decays, is [1, T, H], or [1, T, H, K] with one decay
        per channel."""
        with torch._C.DisableTorchFunction():
            queries, keys, values = (_floats(part[0]) for part in (query, key, value))
            decays, rates = _floats(g[0]).contiguous(), _floats(beta[0]).contiguous()
            out = torch.empty(values.shape, device=value.device)
            for stretches in self.groups(("recurrent", 0), (out.shape[1], keys.shape[-1], out.shape[-1]), out.device):
                recurrences(out.device).delta_rule(queries, keys, values, decays, rates, stretches, out)
            return out.to(query.dtype).unsqueeze(0), out  # the second value takes the place of the states

    def state_space(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        rate: Tensor,
        write: Tensor,
        read: Tensor,
        dt_bias: Tensor | None = None,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return outputs [1, T, H, P] of a Mamba-2 scan for inputs [1, T, H, P]. Time steps `dt` are [1, T, H], decay
        rates [H], `write` and `read` [1, T, G, N]."""
        with torch._C.DisableTorchFunction():
            steps = _softplus(_floats(dt[0]) if dt_bias is None else _floats(dt[0]) + dt_bias).clamp_(*dt_limit)
            out = self._space((hidden_states, write, read), steps, rate, _optional(others.get("D")))
            return out.unsqueeze(0), out

    def decay(self, value: Tensor, rate: Tensor, key: Tensor, query: Tensor) -> Tensor:
        """Return outputs [1, T, H, V] of linear attention with decay, whose states hold sums of keys times values.
        Inputs are values [1, T, H, V], keys and queries [1, T, H, K], and the logarithms of decays [H]."""
        with torch._C.DisableTorchFunction():
            steps = torch.ones(value.shape[1:3], device=value.device)
            return self._space((value.contiguous(), key.contiguous(), query.contiguous()), steps, rate)[None]

    def _space(
        self, rows: tuple[Tensor, Tensor, Tensor], steps: Tensor, rate: Tensor, skip: Tensor | None = None
    ) -> Tensor:
        inputs, writes, reads = (_floats(part[0]) for part in rows)
        out = torch.empty(inputs.shape, device=inputs.device)
        compute = recurrences(out.device).state_space
        for stretches in self.groups(("recurrent", 0), (*inputs.shape[1:], writes.shape[-1]), out.device):
            compute(inputs, steps, _floats(rate), writes, reads, skip, stretches, out)
        return out

    def scan(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        rate: Tensor,
        write: Tensor,
        read: Tensor,
        delta_bias: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return outputs [1, C, T] of a Mamba-1 scan. `hidden_states`, `dt` and gates are [1, C, T], decay rates are
        [C, N], and `write` and `read` are [1, N, T]."""
        with torch._C.DisableTorchFunction():
            inputs, steps, writes, reads = (_columns(part) for part in (hidden_states, dt, write, read))
            steps = _softplus(steps if delta_bias is None else steps + delta_bias)
            gate, skip = others.get("z"), _optional(others.get("D"))
            gates, out = None if gate is None else _columns(gate), torch.empty(inputs.shape, device=inputs.device)
            compute, key = recurrences(out.device).scan, ("recurrent", self.num_scans)
            self.num_scans += 1
            for stretches in self.groups(key, tuple(rate.shape), out.device):
                compute(inputs, steps, _floats(rate), writes, reads, skip, gates, stretches, out)
            return out.t().unsqueeze(0), out

    def groups(
        self, key: StateKey, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Iterator[list[Stretch]]:
        """Yield the spans with their states, in groups that have at most one span per sequence. Before the caller
        requests the next group, it must have written the states of the current group. The states of the current group
        are then saved where the plan requests it."""
        group: list[Stretch] = []
        first = offset = 0
        for number, span in enumerate(self.spans):
            if number > first and span.states.tensors is self.spans[number - 1].states.tensors:
                yield group
                self._went_in(first, number, key)
                group, first = [], number
            state = span.states.state(key, shape, dtype, device)
            group.append(Stretch(offset, span.length, state, span.states.is_fresh))
            offset += span.length
        yield group
        self._went_in(first, len(self.spans), key)

    def _went_in(self, first: int, end: int, key: StateKey) -> None:
        for span in self.spans[first:end]:
            span.went_in(key)


def _lightning(self: Any, hidden_states: Tensor, past_key_values: PackedStates) -> tuple[Tensor, None]:
    """Compute MiniMax-01's linear attention. The implementation in transformers works in blocks and needs a special
    cache."""
    heads = self.act_fn(self.qkv_proj(hidden_states)).unflatten(-1, (self.num_attention_heads, -1))
    query, key, value = heads.split(self.head_dim, 3)
    rows = past_key_values.decay(value, -self.slope_rate.flatten(), key, query).to(value.dtype).flatten(2)
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * self.norm(rows)), None


def _floats(rows: Tensor) -> Tensor:
    return rows.detach().float()


def _optional(rows: Tensor | None) -> Tensor | None:
    return None if rows is None else _floats(rows)


def _columns(part: Tensor) -> Tensor:
    """Transpose [1, C, T] to [T, C] with contiguous rows."""
    rows = _floats(part[0]).t()
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _sigmoid(rows: Tensor) -> Tensor:
    return torch.exp(-rows.float()).add_(1).reciprocal_().to(rows.dtype)


def _softplus(rows: Tensor) -> Tensor:
    floats = rows.float()
    return torch.where(floats > 20, floats, torch.exp(floats).log1p_()).to(rows.dtype)


_GATES = {torch.sigmoid: _sigmoid, Tensor.sigmoid: _sigmoid, functional.softplus: _softplus}
