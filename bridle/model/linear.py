"""Linear layers with weights in the order that the CPU's matrix library wants, arranged once while loading.

A plain `nn.Linear` has its weights rearranged in every call. Measured with one thread (docs/models.md): float32
matrices of some million numbers gain 1.5 to 2 times at 2 to 32 rows and lose little elsewhere, smaller ones gain less
and lose at one row; bfloat16 gains 1.5 to 2.5 times at any size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

#: Fewest numbers in a float32 matrix that is worth rearranging.
MIN_FLOAT32_SIZE = 1 << 22

_linear = torch.ops.mkldnn._linear_pointwise
_reorder = torch.ops.mkldnn._reorder_linear_weight


class PackedLinear(nn.Module):
    """An `nn.Linear` whose weight is kept rearranged. `weight` gives it back in its usual order (slowly)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed: Tensor = _reorder(linear.weight.detach())
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        return self._packed.to_dense()

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        if rows.numel() == 0:
            return rows.new_empty(*rows.shape[:-1], self.out_features)
        out: Tensor = _linear(rows, self._packed, self.bias, "none", [], "")
        return out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def as_function(linear: nn.Module) -> Callable[[Tensor], Tensor]:
    """`linear` without the cost of a module call. Only for modules that are not replaced any more."""
    if type(linear) is nn.Linear:
        return partial(nn.functional.linear, weight=linear.weight, bias=linear.bias)
    function: Callable[[Tensor], Tensor] = linear.forward
    return function


def is_worth_packing(linear: nn.Linear) -> bool:
    """Whether `linear` runs faster packed, on this machine."""
    weight = linear.weight
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype is torch.float32:
        return weight.numel() >= MIN_FLOAT32_SIZE
    return weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack_linears(model: nn.Module, progress: Callable[[float], None] | None = None) -> int:
    """Replace every plain linear layer that gains by it, one at a time; gives their number."""
    return replace_linears(model, is_worth_packing, PackedLinear, progress)


def replace_linears(
    model: nn.Module,
    wanted: Callable[[nn.Linear], bool],
    make: Callable[[nn.Linear], nn.Module],
    progress: Callable[[float], None] | None = None,
) -> int:
    """Put `make(linear)` in the place of each `nn.Linear` (not of subclasses) that is `wanted`."""
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and not child._forward_hooks and wanted(child)
    ]
    total = len(places)
    for number in range(total):
        parent, name, child = places[number]
        places[number] = None  # type: ignore[call-overload]  # free each original as soon as it is replaced
        setattr(parent, name, make(child))
        if progress is not None:
            progress((number + 1) / total)
    return total
