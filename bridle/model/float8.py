"""Linear layers in 8-bit floating point (e4m3) on CUDA, with one scale per output for weights and one scale per token
for activations. GPUs with compute capability 8.9 or higher multiply float8 values in tensor cores.

Weights take half of the memory of bfloat16, and are read in half of the time. Embeddings, the output head, norms and
attention are not converted to float8.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from bridle.errors import InvalidRequest
from bridle.model.linear import replace_linears

_log = logging.getLogger(__name__)

#: The largest number that e4m3 can represent.
_TOP = 448.0
#: The lowest compute capability with products in 8-bit floating point.
LEAST_CAPABILITY = (8, 9)
#: Both sides of a matrix have to be multiples of this number.
_STEP = 16
#: From this number of rows on, products may be summed with fewer bits. Prompts are twice as fast then, decodes are not.
FAST_ROWS = 65
#: Sizes of the products in the trial: outputs and inputs, and rows of a small, a medium and a large batch.
_TRIAL_SIZES, _TRIAL_ROWS = (512, 256), (1, 40, 80)
#: Maximum difference between a product of rounded numbers and the same product in float32, as a share of the largest
#: value.
_TOLERANCE = 2e-2


class RoundedRows(NamedTuple):
    """Activation rows [n, in] in float8, and their float32 scales [n, 1]."""

    values: Tensor
    scales: Tensor


class Float8Linear(nn.Module):
    """An `nn.Linear` whose weight is float8 [out, in], with a float32 scale for each output."""

    def __init__(self, quantized: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = quantized.shape
        self.dtype = dtype
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(dtype), requires_grad=False)
        self.register_buffer("quantized", quantized.contiguous(), persistent=False)
        self.register_buffer("scale", scale.reshape(1, -1).float().contiguous(), persistent=False)  # [1, out]

    quantized: Tensor
    scale: Tensor

    @classmethod
    def from_float(cls, linear: nn.Linear) -> Float8Linear:
        """Make a float8 layer from a floating-point weight, with each output scaled by its largest value."""
        weight = linear.weight.detach()
        scale = (weight.abs().amax(1, keepdim=True).float() / _TOP).clamp_min_(1e-12)  # [out, 1]
        return cls((weight.float() / scale).to(torch.float8_e4m3fn), scale, linear.bias, weight.dtype)

    @property
    def weight(self) -> Tensor:
        """Return the weight [out, in] in floating point."""
        return (self.quantized.float() * self.scale.t()).to(self.dtype)

    def joined(self, others: list[Float8Linear]) -> Float8Linear:
        """Return one layer that gives the outputs of this layer and of `others`, concatenated."""
        layers = [self, *others]
        bias = None if self.bias is None else torch.cat([layer.bias for layer in layers])  # type: ignore[misc]
        scales = torch.cat([layer.scale for layer in layers], 1)
        return Float8Linear(torch.cat([layer.quantized for layer in layers]), scales, bias, self.dtype)

    def forward(self, rows: Tensor) -> Tensor:
        """Compute the layer: [..., in] -> [..., out]"""
        flat = rows.reshape(-1, self.in_features)
        if flat.shape[0] == 0:
            return rows.new_empty(*rows.shape[:-1], self.out_features)
        scale = flat.abs().amax(1, keepdim=True).float().div_(_TOP).clamp_min_(1e-12)  # [n, 1]
        out = self.multiply(RoundedRows((flat / scale).to(torch.float8_e4m3fn), scale)).to(rows.dtype)
        return out.view(*rows.shape[:-1], self.out_features)

    def multiply(self, rows: RoundedRows) -> Tensor:
        """Multiply rows that were rounded to float8: [n, in] -> [n, out]"""
        # torch supports products with a scale for each row and column only with bfloat16 output.
        out: Tensor = torch._scaled_mm(
            rows.values,
            self.quantized.t(),
            rows.scales,
            self.scale,
            out_dtype=torch.bfloat16,
            use_fast_accum=rows.values.shape[0] >= FAST_ROWS,
        )
        out = out.to(self.dtype)
        if self.bias is not None:
            out += self.bias
        return out


def float8_of(product: Callable[[Tensor], Tensor]) -> Float8Linear | None:
    """Return the `Float8Linear` whose forward function is `product`. Return None if `product` is another function, such
    as one that also adds an adapter's result."""
    layer = getattr(product, "__self__", None)
    is_plain = getattr(product, "__func__", None) is Float8Linear.forward
    return layer if is_plain and isinstance(layer, Float8Linear) else None


def missing_for_float8(device: torch.device) -> str | None:
    """Return the requirement of float8 products that this device does not meet, or None."""
    if device.type != "cuda":
        return f"CUDA; the device is {device}"
    found = torch.cuda.get_device_capability(device)
    if found < LEAST_CAPABILITY:
        return f"a GPU of compute capability {'.'.join(map(str, LEAST_CAPABILITY))}; this one has {found[0]}.{found[1]}"
    return None


def check_float8(device: torch.device) -> None:
    """Raise `InvalidRequest`, with the reason, if `--quantization fp8` is not available on `device`."""
    missing = missing_for_float8(device)
    if missing is not None:
        raise InvalidRequest(f"quantization 'fp8' needs {missing}", "quantization")


def has_float8_shape(shape: tuple[int, int]) -> bool:
    """Return whether a weight [out, in] can be multiplied in float8."""
    return shape[0] % _STEP == 0 and shape[1] % _STEP == 0


def find_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Test float8 products on this device with random values; return a description of the problem, or None."""
    generator = torch.Generator().manual_seed(0)
    try:
        weight = torch.randn(_TRIAL_SIZES, generator=generator).to(device, dtype)
        with torch.device("meta"):
            linear = nn.Linear(_TRIAL_SIZES[1], _TRIAL_SIZES[0], bias=False)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        layer = Float8Linear.from_float(linear)
        for count in _TRIAL_ROWS:
            rows = torch.randn(count, _TRIAL_SIZES[1], generator=generator).to(device, dtype)
            want = functional.linear(_rounded(rows), layer.quantized.float() * layer.scale.t())
            error = float((layer(rows).float() - want).abs().max() / want.abs().max())
            if not error <= _TOLERANCE:  # NaN counts as an error, too
                return f"a product of {count} rows differs by {error:.3g} (limit {_TOLERANCE:.3g})"
    except torch.OutOfMemoryError:
        raise  # the error may be temporary
    except Exception as failure:  # a library, a driver
        return f"{type(failure).__name__}: {failure}"
    return None


def _rounded(rows: Tensor) -> Tensor:
    """Round activations to float8, and return the rounded values as float32."""
    scale = rows.abs().amax(1, keepdim=True).float().div_(_TOP).clamp_min_(1e-12)
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


def use_float8(model: nn.Module, device: torch.device, dtype: torch.dtype) -> int:
    """Convert the linear layers of a model, except its output head, to float8, one at a time. Return the number of
    layers converted to float8. If float8 products fail their test on this device, log the reason and change no
    weights."""
    problem = find_problem(device, dtype)
    if problem is not None:
        _log.warning("weights stay %s, because float8 products fail: %s", str(dtype).removeprefix("torch."), problem)
        return 0
    head = model.get_output_embeddings()  # type: ignore[operator]

    def is_wanted(linear: nn.Linear) -> bool:
        return linear is not head and has_float8_shape((linear.out_features, linear.in_features))

    return replace_linears(model, is_wanted, Float8Linear.from_float)
