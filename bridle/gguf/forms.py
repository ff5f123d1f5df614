"""Converts tensors that a file stores in another form than transformers, in both directions. A file may have added 1 to
a tensor, transposed it, split it or reshaped it. The file may also store values that transformers computes from the
tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bridle.gguf.mla import cut_latent, joined_latent
from bridle.gguf.rows import file_order
from bridle.gguf.rules import TensorRule

#: Changes that apply to weights but not to biases.
_OF_WEIGHTS = ("offset", "conv", "column", "groups")


def library_form(rule: TensorRule, parts: Sequence[Tensor], shape: tuple[int, ...], suffix: str) -> Tensor:
    """Return the tensor for transformers, made from the file's tensors `parts`. The rows of this tensor keep the file's
    order. Raises `RuntimeError`, `IndexError` or `ValueError` if the shapes of `parts` do not fit together."""
    tensor = _joined(rule, parts)
    if rule.change == "slice":
        return tensor[int(rule.model.rpartition(".")[2])].clone()
    change = "" if suffix == ".bias" and rule.change in _OF_WEIGHTS else rule.change
    if _is_turned(change, tensor):
        return tensor.mT.contiguous()
    if change == "offset":
        return tensor - 1
    if change in ("decay", "decays", "rise"):
        tensor = _logarithm(tensor if change == "rise" else -tensor)
    if change in ("line", "conv", "column", "groups", "decay", "decays", "rise"):
        return tensor.reshape(shape)
    return tensor


def _is_turned(change: str, tensor: Tensor) -> bool:
    return (tensor.dim() == 3 and change in ("turned", "woven")) or (tensor.dim() == 2 and change == "turned")


def _joined(rule: TensorRule, parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if rule.change == "latent":
        return joined_latent(parts[0], parts[1])
    if rule.change == "woven":  # [E, n, ...] of gates and of values, whose rows alternate
        return torch.stack(list(parts), 2).flatten(1, 2)
    if rule.change == "conv":
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
    return torch.cat(list(parts), -2 if parts[0].dim() > 1 else 0)


def _logarithm(decay: Tensor) -> Tensor:
    if not bool((decay > 0).all()):
        raise ValueError("a decay must be positive to be stored as a logarithm")
    return decay.log()


def file_forms(rule: TensorRule, tensor: Tensor, suffix: str, config: Any) -> Sequence[Tensor]:
    """Return the file's tensors for a tensor of transformers. The result is float32 if the conversion changes
    values."""
    for dim, order in ((0, rule.order), (-1, rule.columns)):
        rows = file_order(order, tensor.shape[dim], config)
        tensor = tensor if rows is None else tensor.index_select(dim, rows.to(tensor.device))
    change = "" if suffix == ".bias" and rule.change in _OF_WEIGHTS else rule.change
    if change == "latent":
        return cut_latent(tensor, config)
    if _is_turned(change, tensor):
        tensor = tensor.mT
    if change == "woven":
        return [tensor[:, part :: len(rule.file)] for part in range(len(rule.file))]
    return _cut(rule, _changed(change, tensor, config), config)


def _changed(change: str, tensor: Tensor, config: Any) -> Tensor:
    if change == "offset":
        return tensor.float() + 1
    if change in ("decay", "decays"):
        tensor = -tensor.float().exp()
    if change == "rise":
        tensor = tensor.float().exp()
    if change in ("line", "conv"):
        return tensor.squeeze(-2 if change == "conv" else 0)
    if change in ("column", "decays", "rise"):
        return tensor.reshape(-1, 1)
    if change == "groups":
        return tensor.reshape(num_groups(config), -1)
    return tensor


def num_groups(config: Any) -> int:
    """Return the number of groups of a Mamba-2 layer, for which families have different field names."""
    return int(getattr(config, "mamba_n_groups", None) or config.n_groups)


def _cut(rule: TensorRule, tensor: Tensor, config: Any) -> Sequence[Tensor]:
    count = len(rule.file)
    if count == 1:
        return [tensor]
    dim = -2 if tensor.dim() > 1 else 0
    if rule.order != "by key head":
        return tensor.chunk(count, dim)
    gates = int(config.linear_num_value_heads) * int(config.linear_value_head_dim)
    return [tensor[:-gates], tensor[-gates:]]
