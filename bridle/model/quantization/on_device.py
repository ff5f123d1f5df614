"""Chooses the form of packed weights on CUDA. Float8 weights with a scale per output are multiplied in float8 if the
GPU supports it. bridle's kernels read all other weights in their packed form. Each form is compared with plain torch
before it is first used. If the results differ, weights of this form are converted to the model's type, and the log has
the reason."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.nn import functional

from bridle.lora.adapter_kernel import missing_for_triton
from bridle.model import float8
from bridle.model.float8 import Float8Linear
from bridle.model.quantization.code_linear import CodeLinear
from bridle.model.quantization.codes import Codes, make_codes
from bridle.model.quantization.weights import Grouped

_log = logging.getLogger(__name__)

#: Maximum errors of a product, as a share of its largest value.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
#: Rows of the trials, chosen to cover each path of a product and both tile sizes of a kernel.
_TRIAL_ROWS = (1, 40, 70, 300)


def keeps_bits(device: torch.device) -> bool:
    """Return whether packed weights can stay packed on `device`. The kernels for packed weights are tested later."""
    return device.type == "cpu" or missing_for_triton(device) is None


class DeviceForms:
    """Makes the layers of one model on one device, and remembers which forms failed their test."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._are_right: dict[object, bool] = {}

    def make(self, weight: Grouped, bias: Tensor | None) -> nn.Module | None:
        """Return the layer for a packed weight; None if the weight has to be converted to floats."""
        is_float = weight.values.dtype is torch.float8_e4m3fn and weight.zeros is None
        if is_float and weight.scales.shape[1] == 1 and float8.has_float8_shape(weight.shape) and self._has_float8():
            return Float8Linear(weight.values, weight.scales, bias, self._dtype)
        missing = missing_for_triton(self._device)
        if missing is not None:
            self._tell("kernels", f"kernels that read them need {missing}")
            return None
        try:
            codes = make_codes(weight)
        except ValueError as error:
            self._tell(str(weight.values.dtype), str(error))
            return None
        layer = CodeLinear(codes, bias, self._dtype)
        return layer if self._is_right(codes, layer) else None

    def _has_float8(self) -> bool:
        if "float8" not in self._are_right:
            problem = float8.missing_for_float8(self._device)
            if problem is None and (problem := float8.find_problem(self._device, self._dtype)) is not None:
                _log.warning("float8 weights are multiplied as %s, as float8 products fail: %s", self._dtype, problem)
            self._are_right["float8"] = problem is None
        return self._are_right["float8"]

    def _is_right(self, codes: Codes, layer: CodeLinear) -> bool:
        if codes.form not in self._are_right:
            problem = find_problem(layer)
            self._are_right[codes.form] = problem is None
            if problem is not None:
                self._tell(codes.form, f"a kernel for {codes.bits} bits fails: {problem}")
        return self._are_right[codes.form]

    def _tell(self, key: object, reason: str) -> None:
        if (key, "told") not in self._are_right:
            self._are_right[key, "told"] = True
            _log.warning("packed weights are converted to %s: %s", str(self._dtype).removeprefix("torch."), reason)


@torch.inference_mode()
def find_problem(layer: CodeLinear) -> str | None:
    """Test the kernels for a layer like this; return a description of the problem, or None."""
    generator = torch.Generator().manual_seed(layer.in_features)
    number = layer.codes.number()
    try:
        for count in _TRIAL_ROWS:
            rows = torch.randn(count, layer.in_features, generator=generator).to(number.device, layer.dtype)
            bias = None if layer.bias is None else layer.bias.float()
            want = functional.linear(rows.float(), number, bias)
            error = float((layer(rows).float() - want).abs().max() / want.abs().max().clamp_min(1e-12))
            if not error <= _TOLERANCES.get(layer.dtype, 2e-2):  # NaN counts as an error, too
                return f"a product of {count} rows differs by {error:.3g}"
    except torch.OutOfMemoryError:
        raise  # the error may be temporary
    except Exception as failure:  # a compiler, its cache, a driver
        return f"{type(failure).__name__}: {failure}"
    return None
