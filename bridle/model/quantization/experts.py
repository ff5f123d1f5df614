"""Makes the experts of packed checkpoints. Files have a matrix for each expert, while the classes of transformers have
all experts in one tensor. Each expert's matrices stay packed. The files of gpt-oss differ: all experts are in one
tensor of MXFP4 blocks, with gates and values interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bridle.errors import UnsupportedModel
from bridle.model.gguf_matrix import packed_matrix
from bridle.model.quantized_experts import Expert, PackedExperts

#: Makes a layer of the tensors that are stored under a name, to replace an empty layer.
MakeLayer = Callable[[str, nn.Linear], nn.Module]
#: Names of an expert's three matrices: gates, values, and the down projection.
_PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def has_packed_form(module: nn.Module) -> bool:
    """Return whether a module holds the matrices of several experts in one tensor, in a layout that this module
    supports."""
    sides = [
        parameter.dim()
        for name in ("gate_up_proj", "down_proj")
        if (parameter := module._parameters.get(name)) is not None
    ]
    return sides == [3, 3]


def make_experts(name: str, module: Any, has: Callable[[str], bool], make: MakeLayer) -> nn.Module:
    """Return experts with a separate layer for each matrix. `has(name)` returns whether the files have a tensor with
    this name, and `make` makes a layer. Raises `UnsupportedModel`."""
    parts = next((parts for parts in _PARTS if has(f"{name}.0.{parts[0]}")), None)
    if parts is None:
        raise UnsupportedModel(f"the checkpoint lacks the matrices of {name!r}, such as '{name}.0.gate_proj.weight'")
    if not module.has_gate or module.is_transposed or module.has_post_expert_norm:
        raise UnsupportedModel(f"packed experts of {type(module).__name__} are not supported")
    count, double, size = module.gate_up_proj.shape
    with torch.device("meta"):
        inner, outer = nn.Linear(size, double // 2, bias=False), nn.Linear(double // 2, size, bias=False)
    experts: list[Any] = []
    for number in range(count):
        gate, values, down = (
            make(f"{name}.{number}.{part}", outer if at == 2 else inner) for at, part in enumerate(parts)
        )
        experts.append(((gate, values), down))
    return PackedExperts(module, experts)


def make_mxfp4_experts(
    name: str, module: Any, stored: Mapping[str, Tensor], dtype: torch.dtype, *, keeps_blocks: bool
) -> nn.Module:
    """Return the experts of gpt-oss. For both products, `stored` has uint8 blocks [E, out, in / 32, 16], scales [E,
    out, in / 32] and biases."""
    try:
        gates = [(stored[f"gate_up_proj_{part}"]) for part in ("blocks", "scales", "bias")]
        downs = [(stored[f"down_proj_{part}"]) for part in ("blocks", "scales", "bias")]
    except KeyError as error:
        raise UnsupportedModel(f"the checkpoint lacks '{name}.{error.args[0]}'") from None
    size, double = module.gate_up_proj.shape[1:]
    for part, outputs, inputs in ((gates, double, size), (downs, size, double // 2)):
        wanted = (module.num_experts, outputs, inputs // 32)
        if tuple(part[1].shape) != wanted or tuple(part[0].shape) != (*wanted, 16):
            raise UnsupportedModel(
                f"the blocks of {name!r} have shape {tuple(part[0].shape)}, but config.json implies {(*wanted, 16)}"
            )
    experts: list[Expert] = []
    for number in range(module.num_experts):
        blocks, scales, bias = (part[number] for part in gates)
        inner = [mxfp4_layer(blocks[at::2], scales[at::2], bias[at::2], dtype, keeps_blocks) for at in (0, 1)]
        blocks, scales, bias = (part[number] for part in downs)
        experts.append((inner, mxfp4_layer(blocks, scales, bias, dtype, keeps_blocks)))
    return PackedExperts(module, experts)


def mxfp4_layer(
    blocks: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype, keeps_blocks: bool
) -> nn.Module:
    """Return the layer for one matrix from uint8 blocks [out, in / 32, 16] and scales [out, in / 32]. A byte of the
    file holds two neighbouring values. In llama.cpp's blocks, which the layer uses, a byte holds values i and i +
    16."""
    values = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [out, blocks, 32]
    rows = torch.cat((scales.unsqueeze(-1), values[..., :16] | (values[..., 16:] << 4)), -1).flatten(1).contiguous()
    shape = (values.shape[0], values.shape[1] * 32)
    bias = None if bias is None else bias.to(dtype)
    layer = packed_matrix("MXFP4", rows.numpy(), shape, bias, dtype)
    if keeps_blocks:
        return layer
    with torch.device("meta"):
        made = nn.Linear(shape[1], shape[0], bias=bias is not None)
    made.weight = nn.Parameter(layer.weight.to(dtype), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made
