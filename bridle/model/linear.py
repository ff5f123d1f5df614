"""Linear layers whose weights are rearranged once, while loading, for the C kernels or oneDNN (the CPU's matrix
library).

In the C kernels, float32 is at least as fast as with oneDNN's weight order, and two to three times as fast as in
plain torch (dev/log.md). The C kernels also give a row the same bits in any batch. oneDNN's weight order is used for
bfloat16, and for layers that the C kernels do not support. A plain `nn.Linear` rearranges its weights in every call.
Measured with one thread (docs/models.md), oneDNN's order makes bfloat16 1.5 to 2.5 times as fast at any size. Float32
matrices of some million values are 1.5 to 2 times as fast for 2 to 32 rows, and slightly slower for other numbers of
rows. Smaller matrices gain less, and are slower for one row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import psutil
import torch
from torch import Tensor, nn

from bridle.cpu_kernels.linear import FloatLinear

#: Minimum number of values of a float32 matrix for which rearranging for oneDNN pays, and the same for the C kernels.
MIN_FLOAT32_SIZE = 1 << 22
MIN_NATIVE_SIZE = 1 << 18

#: Up to this number of rows a float32 product is faster with the usual order.
MAX_PLAIN_ROWS = 2
#: The share of the free memory that may be used to keep both orders of weights.
PLAIN_SHARE = 0.125

_linear = torch.ops.mkldnn._linear_pointwise
_reorder = torch.ops.mkldnn._reorder_linear_weight


class PackedLinear(nn.Module):
    """An `nn.Linear` whose weight is stored in oneDNN's order. Reading `weight` returns the weight in its usual order,
    which may be slow. With `keeps_plain`, the weight is also stored in the usual order, for calls with one or two rows.
    """

    def __init__(self, linear: nn.Linear, keeps_plain: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed: Tensor = _reorder(linear.weight.detach())
        self._plain: Tensor | None = linear.weight.detach() if keeps_plain else None
        self._max_plain = MAX_PLAIN_ROWS * linear.in_features
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        return self._packed.to_dense() if self._plain is None else self._plain

    def forward(self, rows: Tensor) -> Tensor:
        """Compute the layer: [..., in] -> [..., out]"""
        if self._plain is not None and rows.numel() <= self._max_plain:
            return nn.functional.linear(rows, self._plain, self.bias)
        if rows.numel() == 0:
            return rows.new_empty(*rows.shape[:-1], self.out_features)
        out: Tensor = _linear(rows, self._packed, self.bias, "none", [], "")
        return out


def as_function(linear: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return `linear` as a plain function, without the cost of a module call. The function ignores a later replacement
    of the layer."""
    if type(linear) is nn.Linear and "forward" not in vars(linear):
        return partial(nn.functional.linear, weight=linear.weight, bias=linear.bias)
    function: Callable[[Tensor], Tensor] = linear.forward
    return function


def is_worth_packing(linear: nn.Linear) -> bool:
    """Return whether `linear` is faster as a `PackedLinear` on this machine."""
    weight = linear.weight
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype is torch.float32:
        return weight.numel() >= MIN_FLOAT32_SIZE
    return weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def use_kernels(model: nn.Module, is_lean: bool, progress: Callable[[float], None] | None = None) -> int:
    """Convert the plain linear layers that the C kernels support, one at a time. Return the number of converted layers.
    Small layers are converted only if all decoder layers are lean, because one kernel call then computes whole
    layers."""

    def is_theirs(linear: nn.Linear) -> bool:
        is_large = is_lean or linear.weight.numel() >= MIN_NATIVE_SIZE
        return is_large and FloatLinear.kernels_for(linear) is not None

    def make(linear: nn.Linear) -> nn.Module:
        found = FloatLinear.kernels_for(linear)
        return linear if found is None else FloatLinear(linear, found)

    return replace_linears(model, is_theirs, make, progress)


def pack_linears(model: nn.Module, progress: Callable[[float], None] | None = None) -> int:
    """Replace every plain linear layer that is faster as a `PackedLinear`, one at a time. Return the number of replaced
    layers. In float32, products with one or two rows are faster with the usual weight order. So the weight is also kept
    in the usual order if this takes no memory, or little of the free memory. For example, an output head that shares
    the embedding's weight takes no additional memory.
    """
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    shared = embedding.weight if isinstance(embedding, nn.Embedding) else None
    chosen = [m for m in model.modules() if type(m) is nn.Linear and is_worth_packing(m)]
    needed = sum(m.weight.nbytes for m in chosen if m.weight is not shared)
    has_room = needed <= PLAIN_SHARE * psutil.virtual_memory().available

    def pack(linear: nn.Linear) -> PackedLinear:
        is_free = has_room or linear.weight is shared
        return PackedLinear(linear, keeps_plain=is_free and linear.weight.dtype is torch.float32)

    return replace_linears(model, is_worth_packing, pack, progress)


def replace_linears(
    model: nn.Module,
    wanted: Callable[[nn.Linear], bool],
    make: Callable[[nn.Linear], nn.Module],
    progress: Callable[[float], None] | None = None,
) -> int:
    """Replace each `nn.Linear` (not its subclasses) for which `wanted` returns true by `make(linear)`. `progress` gets
    the share of the weights to replace that is done."""
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and not child._forward_hooks and wanted(child)
    ]
    done, total = 0, sum(child.weight.numel() for _, _, child in places)
    for number in range(len(places)):
        parent, name, child = places[number]
        places[number] = None  # type: ignore[call-overload]  # free each original as soon as it is replaced
        done += child.weight.numel()
        setattr(parent, name, make(child))
        if progress is not None:
            progress(done / total)
    return len(places)
