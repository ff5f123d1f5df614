"""Quantizes linear layers to 8 bits, with one scale per output for weights and one scale per token for activations.
Weights may also be in blocks of 32 inputs, with 8 or 4 bits per value (`bridle.cpu_kernels.linear`).

Integer products are summed exactly, and each token has its own scale, so a row's result does not depend on the other
rows of its batch. Weights take a quarter of the memory of float32. On a CPU, the experts of a mixture are quantized one
by one. Embeddings, norms, attention, and experts in an unsupported layout are not quantized. C kernels and plain torch
give the same bits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from bridle.cpu_kernels.features import cpu_features
from bridle.cpu_kernels.library import kernels
from bridle.cpu_kernels.linear import NativeWeight, QuantizedLinear, int8_weight
from bridle.cpu_kernels.packing import BLOCK
from bridle.model.linear import PackedLinear, replace_linears
from bridle.model.quantized_experts import PackedExperts

_log = logging.getLogger(__name__)

#: Matrices with fewer inputs or outputs than this stay in floating point, because the gain would be too small.
MIN_SIDE = 32
#: The trial product: its inputs and outputs, the rows of a small and of a medium batch, and the number of rounds.
_TRIAL_SIDE, _TRIAL_ROWS, _TRIAL_ROUNDS = 1024, (1, 16), 5


class Int8Linear(nn.Module):
    """A linear layer with 8-bit integer weights and activations, which replaces an `nn.Linear`. The C kernels compute
    the layer if `is_native` is set and they support the processor."""

    def __init__(self, linear: nn.Linear, is_native: bool = True) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self._take(*round_to_int8(weight), linear.bias, weight.dtype, is_native)

    @classmethod
    def from_integers(cls, quantized: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Int8Linear:
        """Make a layer whose weight is `scale` [out] times the int8 integers `quantized` [out, in]."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take(quantized, scale, None if bias is None else nn.Parameter(bias, requires_grad=False), dtype, True)
        return made

    @classmethod
    def from_packed(cls, native: NativeWeight, bias: Tensor | None) -> Int8Linear:
        """Make a layer from a weight that is already in the order of the kernels."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.out_features, made.in_features = native.packed.outputs, native.packed.given
        made.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        made.dtype, made.native = torch.float32, native
        made.register_buffer("quantized", native.packed.weights, persistent=False)
        made.register_buffer("scale", native.packed.scales, persistent=False)
        return made

    def _take(
        self, quantized: Tensor, scale: Tensor, bias: nn.Parameter | None, dtype: torch.dtype, is_native: bool
    ) -> None:
        self.out_features, self.in_features = quantized.shape
        self.bias = bias
        self.dtype = dtype
        self.native: NativeWeight | None = int8_weight(quantized, scale, bias) if is_native else None
        if self.native is not None:
            quantized, scale = self.native.packed.weights, self.native.packed.scales
        self.register_buffer("quantized", quantized, persistent=False)  # [out, in], row-major or packed
        self.register_buffer("scale", scale, persistent=False)

    @property
    def weight(self) -> Tensor:
        """Return the weight [out, in] in floating point, computed from the integers in each call."""
        integers, scale = self.integers()
        return (integers.float() * scale[:, None]).to(self.dtype)

    def integers(self) -> tuple[Tensor, Tensor]:
        """Return the weight's int8 integers [out, in] and its float32 scales [out]."""
        if self.native is not None:
            return self.native.integers()
        return self.quantized, self.scale  # type: ignore[return-value]

    def forward(self, rows: Tensor) -> Tensor:
        """Compute the layer: [..., in] -> [..., out]"""
        if self.native is not None:
            return self.native.multiply(rows)
        flat = rows.reshape(-1, self.in_features)  # [n, in]
        if flat.shape[0] == 0:
            return rows.new_empty(*rows.shape[:-1], self.out_features)
        scale = flat.abs().amax(1, keepdim=True).float().div_(127).clamp_min_(1e-12)  # [n, 1]
        integers = torch.round(flat / scale).to(torch.int8)
        # The transposed view keeps the weight's rows contiguous, which torch's integer product needs.
        sums = torch._int_mm(integers, self.quantized.t())  # type: ignore[operator]  # [n, out] int32
        out = sums.float().mul_(scale).mul_(self.scale)  # type: ignore[arg-type]
        if self.bias is not None:
            out += self.bias
        return out.to(rows.dtype).view(*rows.shape[:-1], self.out_features)


def round_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight [out, in] to int8 with float32 scales [out]."""
    scale = (weight.abs().amax(1).float() / 127).clamp_min(1e-12)  # [out]
    return torch.round(weight.float() / scale[:, None]).to(torch.int8), scale


def quantize_linears(model: nn.Module, form: str = "int8", progress: Callable[[float], None] | None = None) -> int:
    """Quantize experts, and the linear layers that are large enough, one at a time. Return the number of quantized
    layers."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if are_experts(child):
                setattr(parent, name, quantize_experts(child, form))
                child._parameters.clear()  # a gate may be a method of the module, so only the parameters are freed
    return replace_linears(model, is_large, lambda linear: make_quantized(linear, form), progress)


def are_experts(module: nn.Module) -> bool:
    """Return whether a module is a set of experts that can be quantized. The experts' matrices must be on a CPU, large
    enough, and [out, in]."""
    names = ("gate_up_proj", "down_proj") if getattr(module, "has_gate", True) else ("up_proj", "down_proj")
    weights = [module._parameters.get(name) for name in names]
    if not hasattr(module, "is_transposed") or module.is_transposed or module.has_bias or module.has_post_expert_norm:
        return False
    if not module.is_concatenated or module._is_expert_parallel:
        return False
    return all(
        weight is not None and weight.dim() == 3 and weight.device.type == "cpu" and min(weight.shape[1:]) >= MIN_SIDE
        for weight in weights
    )


def quantize_experts(experts: nn.Module, form: str) -> PackedExperts:
    """Return quantized experts in `form` that replace `experts`."""
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    inner, down = (
        [make_quantized(_linear(weight), form) for weight in experts.get_parameter(name).detach()]
        for name in (first, "down_proj")
    )
    return PackedExperts(experts, [((one,), two) for one, two in zip(inner, down, strict=True)])


def _linear(weight: Tensor) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def make_quantized(linear: nn.Linear, form: str) -> nn.Module:
    """Quantize `linear` to `form`: `int8`, `q8_0` or `q4_0`. If the number of inputs is not a multiple of the block
    size, the form is `int8`."""
    if form == "int8" or linear.in_features % BLOCK:
        return Int8Linear(linear)
    layer = QuantizedLinear.from_float(linear.weight, form.upper(), linear.bias)
    layer.prepare()
    return layer


def prepare_quantized(model: nn.Module) -> int:
    """Convert layers with weights that were stored quantized to the order of the kernels. Return the number of
    converted layers."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    return sum(layer.prepare() for layer in layers)


def is_worthwhile(form: str) -> bool:
    """Return whether this processor computes in `form` at least as fast as in float32; if not, log the reason.

    The C kernels always are at least as fast. Without C kernels, blocks are decoded to floating point in each call. If
    the processor has no instructions for integer products, torch multiplies 8-bit integers one by one, a hundred times
    slower.
    """
    if kernels() is not None:
        return True
    if form != "int8":
        _log.warning("no CPU kernels fit this processor, and %s is slow without them: weights stay float32", form)
        return False
    ratio = int8_ratio()
    if ratio <= 1:
        return True
    features = ", ".join(sorted(cpu_features())) or "unknown"
    _log.warning(
        "int8 products take %.1f times as long as float32 on this processor (features: %s): weights stay float32",
        ratio,
        features,
    )
    return False


@cache
def int8_ratio() -> float:
    """Return the time that torch takes for an 8-bit product, divided by the time for a float32 product. The result is
    the smaller ratio for two batch sizes, measured once in this process."""
    linear = nn.Linear(_TRIAL_SIDE, _TRIAL_SIDE, bias=False).requires_grad_(False)
    is_packed = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    forms = (Int8Linear(linear, is_native=False), PackedLinear(linear, keeps_plain=True) if is_packed else linear)
    with torch.inference_mode():
        trials = (torch.ones(rows, _TRIAL_SIDE) for rows in _TRIAL_ROWS)
        return min(_best_time(forms[0], rows) / _best_time(forms[1], rows) for rows in trials)


def _best_time(form: nn.Module, rows: Tensor) -> float:
    times = []
    for _ in range(_TRIAL_ROUNDS):
        begin = time.perf_counter()
        form(rows)
        times.append(time.perf_counter() - begin)
    return min(times)


def is_large(linear: nn.Linear) -> bool:
    """Return whether the layer is large enough to become faster by quantization."""
    return min(linear.in_features, linear.out_features) >= MIN_SIDE
