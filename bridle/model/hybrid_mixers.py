"""Describes mixers to the C kernels: gated delta nets, Mamba-2 and Mamba. The names of a mixer's parts determine its
kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bridle.cpu_kernels.kernels import Matrix
from bridle.cpu_kernels.mixers import Mixer
from bridle.model.dense_layer import is_close
from bridle.model.gguf_matrix import ReorderedInputs

_PARAMETER_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


class CannotDescribe(Exception):
    """Raised for a layer with a part that the kernels cannot compute."""


def norm_weight(norm: Any) -> tuple[Tensor, float]:
    """Return the factors of an RMS norm (its weight, or 1 plus its weight) and its epsilon. Raises `CannotDescribe` for
    a norm of another kind."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
    if isinstance(weight, Tensor) and weight.dim() == 1 and isinstance(eps, float):
        rows = torch.randn(2, len(weight), generator=torch.Generator().manual_seed(0))
        normed = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
        with torch.inference_mode():
            want = norm(rows)
        for each in (weight.detach().float(), weight.detach().float() + 1.0):
            if is_close(want, normed * each):
                return each.contiguous(), eps
    raise CannotDescribe(f"the norm {type(norm).__name__} is not supported")


def reordered(mixer: Mixer | None, last: ReorderedInputs) -> Mixer:
    """Return the description of a delta net that orders its heads as the columns of `last`, the matrix after it."""
    if mixer is None or mixer.kind != "delta_net":
        raise CannotDescribe("the output columns of this mixer are reordered, which is not supported")
    blocks = last.inputs.view(mixer.heads, mixer.columns)  # for each output position
    heads = blocks[:, 0] // mixer.columns
    if not torch.equal(blocks, heads[:, None] * mixer.columns + torch.arange(mixer.columns)):
        raise CannotDescribe("output columns are reordered inside heads, which is not supported")
    return replace(mixer, places=heads.argsort().to(torch.int32))


def taps_of(conv: Any) -> tuple[Tensor, Tensor | None]:
    """Return the taps [channels, taps] of a convolution, and its bias."""
    return _floats(conv.weight.squeeze(1)), None if conv.bias is None else _floats(conv.bias)


def _floats(weight: Tensor) -> Tensor:
    return weight.detach().float().contiguous()


def _check_activation(module: Any) -> None:
    if module.activation not in ("silu", "swish"):
        raise CannotDescribe(f"the activation {module.activation!r} is not supported")


def delta_net(module: Any) -> Mixer:
    """Describe the gated delta net of Qwen3.5 and Qwen3-Next."""
    _check_activation(module)
    return Mixer(
        "delta_net",
        *taps_of(module.conv1d),
        *(int(module.num_k_heads), int(module.num_v_heads), int(module.head_k_dim), int(module.head_v_dim)),
        shift=_floats(module.dt_bias),
        fall=-_floats(module.A_log).exp(),
        norm=_floats(module.norm.weight),
        runs=_runs_by_key_head(module) if hasattr(module, "in_proj_qkvz") else None,
        eps=float(module.norm.variance_epsilon),
    )


def _runs_by_key_head(module: Any) -> Tensor:
    """Return where queries, keys, values, gates, rates and decays are in input rows whose heads are grouped by key
    head. The result is int32 [n, 2]: the start and the length of each run of inputs."""
    keys, copies = int(module.head_k_dim), int(module.num_v_heads) // int(module.num_k_heads)
    values = copies * int(module.head_v_dim)
    runs, base = [], 0
    for lengths in ((keys, keys, values, values), (copies, copies)):
        starts = [base + sum(lengths[:part]) for part in range(len(lengths))]
        for start, length in zip(starts, lengths, strict=True):
            runs += [(start + head * sum(lengths), length) for head in range(int(module.num_k_heads))]
        base += int(module.num_k_heads) * sum(lengths)
    return torch.tensor(runs, dtype=torch.int32)


def mamba2(module: Any) -> Mixer:
    """Describe the Mamba-2 mixer of Nemotron-H and other models. The mixer may lack the norm of its outputs."""
    _check_activation(module)
    heads, columns = int(module.num_heads), int(module.head_dim)
    norm = module.norm if hasattr(module.norm, "weight") else None
    if norm is not None:
        size = getattr(norm, "group_size", 0) or len(norm.weight) // getattr(norm, "n_groups", 1)
        if size * module.n_groups != heads * columns or getattr(norm, "norm_before_gate", False):
            raise CannotDescribe(f"norms of {size} values, or before gates, are not supported")
    least, most = module.time_step_limit
    return Mixer(
        "mamba2",
        *taps_of(module.conv1d),
        *(int(module.n_groups), heads, int(module.ssm_state_size), columns),
        shift=_floats(module.dt_bias),
        fall=-_floats(module.A_log).exp(),
        skip=_floats(module.D),
        norm=None if norm is None else _floats(norm.weight),
        eps=0.0 if norm is None else float(norm.variance_epsilon),
        limits=(float(least), float(most)),
    )


def mamba(module: Any, inner: Sequence[Matrix]) -> Mixer:
    """Describe the mixer of Jamba: a Mamba-1 mixer that normalizes its parameters."""
    _check_activation(module)
    channels = int(module.intermediate_size)
    norms = [norm_weight(getattr(module, name)) for name in _PARAMETER_NORMS if hasattr(module, name)]
    return Mixer(
        "mamba",
        *taps_of(module.conv1d),
        *(1, channels, int(module.ssm_state_size), 1),
        fall=-_floats(module.A_log).exp(),
        skip=_floats(module.D),
        norm=torch.cat([weight for weight, _ in norms]) if norms else None,
        inner=inner,
        eps=norms[0][1] if norms else 0.0,
    )
